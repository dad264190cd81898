// Serves the files of the web page.
#pragma once

#include "server/router.h"

namespace moesaic::server {

/// Adds GET routes for the files of the page and for "/". They need no key.
void AddPage(Router& router);

}  // namespace moesaic::server
