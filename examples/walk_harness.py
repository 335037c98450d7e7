r"""An agent harness: a model looks for the garden of a house with a tool.

It uses the `openai` package and knows nothing about training, except that it
asks for episodes and reports rewards:

    python examples/walk_harness.py http://127.0.0.1:8020 --episodes-at-once=16

The house is always the same, and the task names the first room. The model has
no map: it has to learn which door leads where.
"""

import argparse
import concurrent.futures
import json
import os
import time
import urllib.error
import urllib.request

# Where the doors of each room lead. The longest way has five steps.
HOUSE = {
  'hall': {'north': 'study'},
  'study': {'south': 'hall', 'east': 'library'},
  'library': {'west': 'study', 'east': 'attic', 'south': 'kitchen'},
  'attic': {'west': 'library'},
  'kitchen': {'north': 'library', 'east': 'pantry', 'south': 'cellar'},
  'cellar': {'north': 'kitchen', 'west': 'garage'},
  'garage': {'east': 'cellar'},
  'pantry': {'west': 'kitchen', 'south': 'garden'},
}
GOAL = 'garden'
DIRECTIONS = ('north', 'east', 'south', 'west')
MAX_STEPS = 6
OVER = 410  # HTTP status at the end of a run.
TOOL = {
  'name': 'go',
  'description': 'Goes through a door.',
  'parameters': {
    'type': 'object',
    'properties': {
      'direction': {'type': 'string', 'enum': list(DIRECTIONS)},
    },
    'required': ['direction'],
  },
}


def first_room(task: int) -> str:
  """Returns the room in which a task begins."""
  return list(HOUSE)[task % len(HOUSE)]


def first_messages(room: str) -> list[dict]:
  """Returns the messages before the first step."""
  text = f'Find the {GOAL} in {MAX_STEPS} steps. You are in the {room}.'
  return [{'role': 'user', 'content': text}]


def walk(room: str, direction: object) -> tuple[str, str]:
  """Returns the next room and the answer of the tool."""
  after = HOUSE[room].get(str(direction))
  if after is None:
    return room, f'There is no door. You are in the {room}.'
  return after, f'You are in the {after}.'


def play(client, room: str) -> bool:
  """Plays an episode; returns whether the model found the garden."""
  messages = first_messages(room)
  tools = [{'type': 'function', 'function': TOOL}]
  for _ in range(MAX_STEPS):
    reply = client.chat.completions.create(
      model='policy',
      messages=messages,
      tools=tools,
      metadata={'anchor': room},
    )
    message = reply.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
      messages.append({'role': 'user', 'content': 'Use the tool.'})
      continue
    for call in message.tool_calls:
      direction = json.loads(call.function.arguments).get('direction')
      room, answer = walk(room, direction)
      messages.append(
        {'role': 'tool', 'tool_call_id': call.id, 'content': answer}
      )
      if room == GOAL:
        return True
  return False


def post(url: str, body: dict, key: str) -> dict | None:
  """Sends JSON; returns the JSON of the answer, None if it is empty."""
  request = urllib.request.Request(
    url,
    json.dumps(body).encode(),
    {'Content-Type': 'application/json', 'Authorization': f'Bearer {key}'},
  )
  with urllib.request.urlopen(request) as response:
    return json.loads(response.read() or 'null')


def play_episodes(url: str, key: str) -> None:
  """Plays episodes until the run is over."""
  import openai

  # Copies share its connections.
  client = openai.OpenAI(base_url=f'{url}/v1', api_key=key)
  while True:
    try:
      episode = post(f'{url}/episodes', {}, key)
    except urllib.error.HTTPError as error:
      if error.code == OVER:
        return
      raise
    except OSError:  # The server has ended.
      return
    if episode is None:
      continue
    base = f'{url}/episodes/{episode["id"]}'
    try:
      own = client.with_options(base_url=f'{base}/v1')
      success = play(own, first_room(episode['task']))
      reward = {'reward': 10.0 * success, 'success': success}
      post(f'{base}/reward', reward, key)
    except (openai.APIStatusError, urllib.error.HTTPError) as error:
      print(f'{episode["id"]}: {error}')  # The next episode may go well.


def wait_for(url: str) -> None:
  """Waits until the server accepts connections."""
  is_waiting = False
  while True:
    try:
      urllib.request.urlopen(f'{url}/v1/models').close()
    except urllib.error.HTTPError:
      return
    except OSError:
      if not is_waiting:
        print(f'waiting for {url}, the address of launch/serve.py', flush=True)
      is_waiting = True
      time.sleep(1.0)
    else:
      return


def main() -> None:
  """Plays several episodes at once."""
  parser = argparse.ArgumentParser(description='Walks through a house.')
  parser.add_argument('url', help='address of the server')
  parser.add_argument('--episodes-at-once', type=int, default=16)
  args = parser.parse_args()
  key = os.environ.get('OPENAI_API_KEY', 'none')
  url = args.url.rstrip('/')
  if not url.startswith(('http://', 'https://')):
    parser.error(f'url={url}: must start with http:// or https://')
  wait_for(url)
  with concurrent.futures.ThreadPoolExecutor(args.episodes_at_once) as pool:
    for future in [
      pool.submit(play_episodes, url, key) for _ in range(args.episodes_at_once)
    ]:
      future.result()


if __name__ == '__main__':
  main()
