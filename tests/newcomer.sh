#!/usr/bin/env bash
# Does what a newcomer does, and prints the seconds of each thing: a clone, `make serve` to its first answer, the README's
# requests, a chat in a terminal, the page in Chromium, `facet prove`, a wheel. It needs the package index, and fails with the
# first thing that does not work. Run it in the repository, with a folder for a picture of the page if one is wanted.
# With VENV, a virtual environment, it installs nothing but takes the packages from there, and ends with Ctrl-C.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
pictures=${1:-}
folder=$(mktemp -d)
# Below the ports that Linux gives to connections: none takes it between its choice and its use.
until port=$((10000 + RANDOM % 22000)) && ! (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; do :; done
url=http://127.0.0.1:$port
server=
trap '[ -z "$server" ] || kill -INT -- "-$server" 2> /dev/null || true; wait; rm -rf "$folder"' EXIT
began=$(date +%s%N)
took() {
    local now
    now=$(date +%s%N)
    printf '%7.1f s  %s\n' "$(((now - began) / 100000000))e-1" "$1"
    began=$(date +%s%N)
}
fail() {
    echo "newcomer: $1" >&2
    [ ! -f "$folder/serve.log" ] || tail -20 "$folder/serve.log" >&2
    exit 1
}

git clone --quiet "$root" "$folder/facet"
cd "$folder/facet"
took "git clone"
if [ -n "${VENV:-}" ]; then
    "$VENV/bin/python" -m venv --without-pip .venv
    purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
    printf '%s\nimport site; site.addsitedir("%s")\n' "$PWD" "$("$VENV/bin/python" -c "$purelib")" \
        > "$(.venv/bin/python -c "$purelib")/packages.pth"
    sed "1s|.*|#!$PWD/.venv/bin/python|" "$VENV/bin/facet" > .venv/bin/facet
    chmod +x .venv/bin/facet
    touch .venv/.serving
fi

set -m
make serve ARGS="--port $port" > "$folder/serve.log" 2>&1 &
server=$!
set +m
until curl --silent --fail "$url/ready" > /dev/null; do
    kill -0 "$server" 2> /dev/null || fail "make serve has ended"
    sleep 0.2
done
took "make serve: installed and ready ($(du -sm .venv | cut -f 1) MB)"

ask() { curl --silent --fail-with-body "$url$1" -H 'Content-Type: application/json' -d "$2" || fail "$1 is not answered"; }
ask /v1/chat/completions '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}' | grep -q Paris \
    || fail "the README's chat has no answer"
took "the first chat"
ask /v1/embeddings '{"input": ["Hello"]}' | grep -q embedding || fail "the README's embedding has no answer"
took "the first embedding"

if command -v script > /dev/null; then
    printf 'What is 3 plus 4?\n/bye\n' \
        | script --quiet --return --command ".venv/bin/facet chat --url $url" /dev/null > "$folder/chat.txt" || fail "facet chat has failed"
    grep -q 7 "$folder/chat.txt" || fail "facet chat has not answered: $(tail -3 "$folder/chat.txt")"
    took "facet chat in a terminal"
fi
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)
if [ -n "$browser" ]; then
    shown=${pictures:-$folder}/newcomer-page.png
    "$browser" --headless=new --no-sandbox --disable-gpu --window-size=1200,900 --virtual-time-budget=3000 \
        --screenshot="$shown" "$url/" > /dev/null 2>&1 || fail "the page has no picture"
    [ "$(stat --format %s "$shown")" -gt 10000 ] || fail "the picture of the page is empty"
    took "the page in a browser"
fi
.venv/bin/facet models --url "$url" > /dev/null || fail "facet models"
.venv/bin/facet doctor > /dev/null || fail "facet doctor finds something broken"
took "facet models, facet doctor"
kill -INT -- "-$server" && wait "$server" 2> /dev/null || true
server=
grep -q stopped "$folder/serve.log" || fail "Ctrl-C does not say that the server has stopped"
took "Ctrl-C to the end"
[ -z "${VENV:-}" ] || exit 0
.venv/bin/facet prove demo > /dev/null || fail "facet prove demo"
took "facet prove demo"
make serve ARGS="--port $port" > "$folder/serve.log" 2>&1 &
server=$!
until curl --silent --fail "$url/ready" > /dev/null; do sleep 0.05; done
took "make serve again, to ready"
pkill -INT -f "port $port" || true
wait "$server" 2> /dev/null || true
server=
.venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir "$folder/wheels" . || fail "no wheel is built"
took "pip wheel ($(du -m "$folder"/wheels/*.whl | cut -f 1) MB)"
