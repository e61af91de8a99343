"""A tiny agent program for tests of the launcher, of the standard library alone. Its first argument: how it behaves.

`work` is a loop of its own over chat completions: calls of the tool `bash` are run here, others outside, through the
task's own tools; its last reply is its answer.
"""

import json
import os
import pwd
import subprocess
import sys
import time
import urllib.error
import urllib.request

BASE, HOME = os.environ["BASE_URL"], os.environ["HOME"]


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def use(function):
    name, arguments = function["name"], json.loads(function["arguments"])
    if name == "bash":
        return subprocess.run(["bash", "-c", arguments["command"]], capture_output=True, text=True).stdout
    return post(f"http://127.0.0.1:8000/tools/{name}", arguments)[1]["content"]


def work():
    with open(f"{HOME}/task.json") as file:
        task = json.load(file)
    tools = [{"type": "function", "function": schema} for schema in task["tools"]]
    if task["workspace"]:
        tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(task["max_turns"]):
        body = {"model": "m", "messages": messages, **({"tools": tools} if tools else {})}
        status, reply = post(f"{BASE}/chat/completions", body)
        assert status == 200, reply
        message = reply["choices"][0]["message"]
        messages.append({key: value for key, value in message.items() if value is not None})
        if not message.get("tool_calls"):
            break
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": use(call["function"])}
            for call in message["tool_calls"]
        ]
    with open("/workspace/.answer", "w") as file:
        file.write(message["content"] or "")
    print("done")


def reach():
    """What of the outside is to be had."""
    print(pwd.getpwuid(os.getuid()).pw_dir, os.getcwd())
    other = "http://127.0.0.1:8000"
    for url in (f"{other}/t/other/v1/chat/completions", f"{BASE[:-3]}/report", f"{BASE}/../report", f"{other}/metrics"):
        print(url.rpartition("/")[2], post(url, {"reward": 1, "ended": True})[0])
    for host in ("1.1.1.1", sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1"):
        try:
            urllib.request.urlopen(f"http://{host}", timeout=1)
            print("reached", host)
        except OSError:
            print("nothing at", host)


def fork():
    while True:
        try:
            if os.fork() == 0:
                time.sleep(1000)
        except OSError:
            time.sleep(1000)


match sys.argv[1]:
    case "work":
        work()
    case "reach":
        reach()
    case "hang":
        time.sleep(1000)
    case "flood":
        while True:
            print("x" * 1000)
    case "fork":
        fork()
    case "crash":
        raise RuntimeError("it broke")
    case "daemon":
        work()
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    case code:
        sys.exit(int(code))
