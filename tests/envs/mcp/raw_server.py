"""An MCP server on stdio without the SDK: it answers with whatever result or error its tool `say` is called with."""

import json
import sys

TOOL = {
    "name": "say",
    "inputSchema": {"type": "object", "properties": {"answer": {"type": "string"}}},
}

for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    answer = {}
    if message["method"] == "initialize":
        version = message["params"]["protocolVersion"]
        info = {"name": "raw", "version": "1"}
        answer = {
            "result": {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": info,
            }
        }
    elif message["method"] == "tools/list":
        answer = {"result": {"tools": [TOOL], "nextCursor": ""}}
    elif message["method"] == "tools/call":
        answer = json.loads(message["params"]["arguments"]["answer"])
    else:
        answer = {"error": {"code": -32601, "message": "unknown method"}}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)
