"""An OpenAI-compatible endpoint without a model: it walks through mazes with a hand on the wall."""

import argparse
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CLOCKWISE = ("up", "right", "down", "left")


def next_move(messages: list[dict[str, str]]) -> str:
    """Keep the right hand on the wall: try right, ahead, left and back, seen from the last move."""
    walls = re.findall(r"Walls: ([\w, ]+)\.", messages[-1]["content"])
    blocked = walls[-1].split(", ") if walls else []
    moves = [
        message["content"].removeprefix("move ")
        for message in messages
        if message["role"] == "assistant"
    ]
    heading = CLOCKWISE.index(moves[-1]) if moves else 0
    ways = [CLOCKWISE[(heading + turn) % 4] for turn in (1, 0, 3, 2)]
    return next(way for way in ways if way not in blocked)


class Endpoint(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send({"data": [{"id": "wall-follower"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": f"move {next_move(request['messages'])}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._send(
            {
                "id": "reply",
                "choices": [choice],
                "usage": {"prompt_tokens": 0, "completion_tokens": 2},
            }
        )

    def _send(self, answer: dict[str, object]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing per request."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Endpoint).serve_forever()
