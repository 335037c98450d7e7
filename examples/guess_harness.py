r"""An agent harness: a model guesses a number with a tool.

It uses the `openai` package and knows nothing about training, except that it
asks for episodes and reports rewards:

    python examples/guess_harness.py http://127.0.0.1:8020 --episodes-at-once=16
"""

import argparse
import concurrent.futures
import json
import os
import time
import urllib.error
import urllib.request

MAX_NUMBER, MAX_GUESSES = 8, 4
OVER = 410  # HTTP status at the end of a run.
TOOL = {
  'name': 'guess',
  'description': 'Guesses the number.',
  'parameters': {
    'type': 'object',
    'properties': {'number': {'type': 'integer'}},
  },
}


def first_messages() -> list[dict]:
  """Returns the messages before the first guess."""
  text = f'Find the number from 1 to {MAX_NUMBER} in {MAX_GUESSES} guesses.'
  return [{'role': 'user', 'content': text}]


def judge(secret: int, number: object) -> str:
  """Returns the answer of the tool."""
  if not isinstance(number, int):
    return 'not a number'
  if number == secret:
    return 'right'
  return 'higher' if number < secret else 'lower'


def play(client, secret: int) -> bool:
  """Plays a game; returns whether the model found the number."""
  messages = first_messages()
  tools = [{'type': 'function', 'function': TOOL}]
  low, high = 1, MAX_NUMBER
  for _ in range(MAX_GUESSES):
    reply = client.chat.completions.create(
      model='policy',
      messages=messages,
      tools=tools,
      metadata={'anchor': f'{low} to {high}'},
    )
    message = reply.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
      messages.append({'role': 'user', 'content': 'Use the tool.'})
      continue
    for call in message.tool_calls:
      number = json.loads(call.function.arguments).get('number')
      answer = judge(secret, number)
      messages.append(
        {'role': 'tool', 'tool_call_id': call.id, 'content': answer}
      )
      if answer == 'right':
        return True
      if answer == 'higher':
        low = max(low, number + 1)
      elif answer == 'lower':
        high = min(high, number - 1)
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
    client = openai.OpenAI(base_url=f'{base}/v1', api_key=key)
    try:
      success = play(client, episode['task'] % MAX_NUMBER + 1)
      reward = {'reward': 10.0 * success, 'success': success}
      post(f'{base}/reward', reward, key)
    except (openai.APIStatusError, urllib.error.HTTPError) as error:
      print(f'{episode["id"]}: {error}')  # The next episode may go well.


def wait_for(url: str) -> None:
  """Waits until the server accepts connections."""
  while True:
    try:
      urllib.request.urlopen(f'{url}/v1/models').close()
    except urllib.error.HTTPError:
      return
    except OSError:
      time.sleep(1.0)
    else:
      return


def main() -> None:
  """Plays several episodes at once."""
  parser = argparse.ArgumentParser(description='Plays guessing games.')
  parser.add_argument('url', help='address of the server')
  parser.add_argument('--episodes-at-once', type=int, default=16)
  args = parser.parse_args()
  key = os.environ.get('OPENAI_API_KEY', 'none')
  url = args.url.rstrip('/')
  wait_for(url)
  with concurrent.futures.ThreadPoolExecutor(args.episodes_at_once) as pool:
    for future in [
      pool.submit(play_episodes, url, key) for _ in range(args.episodes_at_once)
    ]:
      future.result()


if __name__ == '__main__':
  main()
