"""A server that grades by a rule, to try judge.py without a model: long responses are good.

ppo.py --reward_fn stub.py:judged        starts the server in the run itself, and asks it
python stub.py 8000                      starts it alone
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
import judge  # noqa: E402


class Judge(BaseHTTPRequestHandler):
    """Answers /v1/chat/completions: the grade is the number of words of the response, 1 to 10."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        response = asked["messages"][0]["content"].split("----------\n")[3]
        reply = str(min(max(len(response.split()), 1), 10))
        body = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        """Says nothing: a line for each request would bury the run's own."""


def serve(port=0, handler=Judge):
    """Starts the server in a thread of this process, and returns its address."""
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}/v1"


def judged(prompts, completions, **columns):
    """judge.judge, with this server as the judge."""
    if "JUDGE_URL" not in os.environ:
        os.environ.update(JUDGE_URL=serve(), JUDGE_MODEL="stub")
    return judge.judge(prompts, completions, **columns)


if __name__ == "__main__":
    print(serve(int(sys.argv[1])), flush=True)
    threading.Event().wait()
