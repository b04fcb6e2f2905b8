#!/usr/bin/env bash
# Asks one NATS subject and prints the answer: what `nats request SUBJECT ''` does, for machines without any NATS client.
# Usage: deploy/ask.sh HOST:PORT SUBJECT
set -euo pipefail
if [ $# -ne 2 ]; then
    echo "usage: $0 HOST:PORT SUBJECT" >&2
    exit 2
fi
server=${1#nats://}
subject=$2
inbox="_INBOX.ask.$$.$RANDOM"
exec 3<>"/dev/tcp/${server%:*}/${server##*:}"
printf 'CONNECT {"verbose":false,"no_responders":true,"headers":true}\r\nSUB %s 1\r\nPUB %s %s 0\r\n\r\n' \
    "$inbox" "$subject" "$inbox" >&3
while IFS= read -r -t 5 line <&3; do
    line=${line%$'\r'}
    case $line in
    MSG*)
        LC_ALL=C IFS= read -r -N "${line##* }" -t 5 answer <&3
        printf '%s\n' "$answer"
        exit 0
        ;;
    HMSG*)
        echo "$0: nobody answers $subject" >&2
        exit 1
        ;;
    -ERR*)
        echo "$0: the server says ${line#-ERR }" >&2
        exit 1
        ;;
    esac
done
echo "$0: no answer from $subject within 5 s" >&2
exit 1
