#!/usr/bin/env python3
"""A conversation with the model of a running cluster, whose decode worker is killed in the middle.

Usage: deploy/conversation.py PINION_BINARY CLUSTER_DIR URL

Prints each question and answer, what of the prompt was in cache, and, from the session's events, what the turn after
the kill computed and moved. Exits with 1 if a turn fails, or if nothing of the lost worker's KV was found on the prefill worker.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

SYSTEM = (
    "You are a friendly teacher. You explain the world to children in short and simple sentences, you like stories about "
    "animals, and you remember what was said before. When you tell a story, you give each animal a name."
)
QUESTIONS = [
    "Why is the sky blue?",
    "And why is the sunset red?",
    "Tell me a short story about a fox who loved the sunset.",
    "What was the name of the fox?",
]
MODEL = "SmolLM2-135M-Instruct.Q4_1"
# The decode worker dies before this question.
KILL_BEFORE = 3
# What the router takes to notice, and the backup to arrive, at the most.
NOTICE_SECONDS = 3


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"{url} answered {error.code}: {error.read().decode()}")


class Cluster:
    def __init__(self, binary, folder):
        self.binary, self.folder = binary, folder
        self.events = []
        follow = [binary, "--dir", folder, "events"]
        self.follower = subprocess.Popen(follow, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        atexit.register(self.follower.kill)
        os.set_blocking(self.follower.stdout.fileno(), False)

    def read_events(self):
        for line in iter(self.follower.stdout.readline, ""):
            self.events.append(json.loads(line))
        return self.events

    def last(self, **wanted):
        found = [e for e in self.read_events() if all(e.get(k) == v for k, v in wanted.items())]
        return found[-1] if found else {}

    def kill(self, name):
        with open(os.path.join(self.folder, "state.json")) as state:
            processes = json.load(state)["processes"]
        os.kill(next(p["pid"] for p in processes if p["name"] == name), signal.SIGKILL)


def tell(question, answer, seconds):
    usage, how = answer["usage"], answer["pinion"]
    print(f"\n  you    {question}")
    print("  model  " + " ".join(answer["choices"][0]["message"]["content"].split()))
    path = how["path"] + (f" ({how['why']})" if how.get("why") else "")
    print(f"         {path}; {how['cached_tokens']} of {usage['prompt_tokens']} prompt tokens were on its decode worker; {seconds:.1f} s")


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    cluster = Cluster(*sys.argv[1:3])
    messages = [{"role": "system", "content": SYSTEM}]
    time.sleep(0.5)
    victim = None
    for number, question in enumerate(QUESTIONS):
        if number == KILL_BEFORE:
            time.sleep(1)
            victim = cluster.last(what="bound")["worker"]
            print(f"\n  ---    kill -9 {victim}, which holds the session")
            cluster.kill(victim)
            time.sleep(NOTICE_SECONDS)
        messages.append({"role": "user", "content": question})
        begun = time.time()
        answer = post(sys.argv[3], {"model": MODEL, "max_tokens": 60, "messages": messages})
        tell(question, answer, time.time() - begun)
        messages.append(answer["choices"][0]["message"])
    time.sleep(0.5)
    seeded, bound = cluster.last(what="seeded"), cluster.last(what="bound")
    backup = answer["usage"]["prompt_tokens"] - seeded["computed_tokens"]
    print(f"\n  After {victim} was lost, the session went on on {bound['worker']}: {seeded['worker']} had {backup} of the")
    print(f"  {answer['usage']['prompt_tokens']} prompt tokens as backup, computed the other {seeded['computed_tokens']}, and moved {seeded['moved_pages']} pages of KV.")
    if bound["worker"] == victim or backup <= 0:
        sys.exit("the backup was not used")


if __name__ == "__main__":
    main()
