#!/usr/bin/env bash
# Installs Chromium, for the tests of the site, where nobody has to be asked: for root on Debian, as in a container. Elsewhere
# says what to install; those tests are skipped without it, but not by CI.
set -euo pipefail

for name in chromium chromium-browser google-chrome google-chrome-stable chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing chromium, for the tests of the site"
    if apt-get update -qq &&
        DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends chromium >/dev/null; then exit 0; fi
fi

echo "No browser here: tests of the site need Chromium (on Debian: apt install chromium)." >&2
if [ "${CI:-}" = true ]; then exit 1; fi
