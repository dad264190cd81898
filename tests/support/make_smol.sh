#!/bin/sh
# Makes moesaic-smol, or fetches only its GGUF, for the tests that need it.
# Usage: make_smol.sh PATH_TO_MAKE_SH PATH_TO_MOESAIC|--fetch-only
# Where the download fails, this test and those that need the model are skipped, with the reason. In CI they fail.
if ! "$1" --fetch-only; then
  [ -z "${CI:-}" ] || exit 1
  echo "SKIPPED: the GGUF of moesaic-smol could not be fetched"
  exit 77
fi
[ "$2" = --fetch-only ] || exec "$1" "$2"
