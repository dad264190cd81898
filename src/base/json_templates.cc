#include "base/json_templates.h"

MOESAIC_JSON_TEMPLATES()
