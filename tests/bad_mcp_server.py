"""An MCP server that misbehaves on request, for tests; it needs no package.

    python tests/bad_mcp_server.py FAULT

FAULT is a fault of the start, or '' for none. The tool `do` takes a fault of
a call.
"""

import json
import sys
import time

FAULT = sys.argv[1]
SCHEMA = {'type': 'object', 'properties': {'what': {'type': 'string'}}}


def _tools() -> list[dict]:
  wrong = {'type': 'object', 'properties': {'what': {'type': 'words'}}}
  schema = wrong if FAULT == 'lie' else SCHEMA
  tools = [{'name': 'do', 'inputSchema': schema}]
  if FAULT == 'endless':
    tools = [{'name': f'do{n}', 'inputSchema': SCHEMA} for n in range(300)]
  return [*tools, {'name': 'score', 'inputSchema': {'type': 'object'}}]


def _call(name: str, what: str) -> dict:
  if what == 'hang':
    time.sleep(60)
  if what == 'chat':
    sys.stderr.write(5_000 * 'x' + '\n')
  if what == 'die':
    sys.exit('out of cheese')
  text = 'x' * 10_000_000 if what == 'huge' else f'did {what}'
  if name == 'score':
    text = 'splendid'
  content = [{'type': 'text', 'text': text}]
  if what == 'odd':
    content = 'not a list'
  return {'content': content, 'isError': what == 'fail'}


def _reply(method: str, params: dict) -> dict | None:
  if method == 'initialize':
    if FAULT == 'mute':
      time.sleep(60)
    return {
      'protocolVersion': params['protocolVersion'],
      'capabilities': {'tools': {}},
      'serverInfo': {'name': 'bad', 'version': '0'},
      'instructions': 'Be good.',
    }
  if method == 'tools/list':
    return {'tools': _tools()}
  if method == 'tools/call':
    return _call(params['name'], params['arguments'].get('what', ''))
  return None


if FAULT == 'down':
  sys.exit('no licence found')
for line in sys.stdin:
  request = json.loads(line)
  if 'id' not in request:
    continue
  reply = {'jsonrpc': '2.0', 'id': request['id']}
  result = _reply(request['method'], request.get('params', {}))
  if result is None:
    reply['error'] = {'code': -32601, 'message': 'unknown method'}
  else:
    reply['result'] = result
  print(json.dumps(reply), flush=True)
