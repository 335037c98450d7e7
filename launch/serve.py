r"""Trains a policy on episodes that an agent harness plays over HTTP.

    python launch/serve.py --config=configs/endpoint.py --config.model.path=..

The harness asks for an episode, plays it with OpenAI's chat completions and
sends a reward; docs/endpoint.md describes the requests. Rerun a command to
resume its run.
"""

from gigpo_jax.runtime import output
from launch import interrupt

_MIN_TOKEN_CHARS = 16


@interrupt.handle()
@output.handle()
def main() -> None:
  """Parses the flags, serves the policy and trains it."""
  import functools

  from absl import flags

  from launch import command, lines, train

  host = flags.DEFINE_string(
    'host',
    '127.0.0.1',
    'Address to listen on; needs --token_file if other machines can connect.',
  )
  port = flags.DEFINE_integer(
    'port',
    8020,
    'Port to listen on; 0: any free port.',
    lower_bound=0,
    upper_bound=65535,
  )
  token_file = flags.DEFINE_string(
    'token_file', None, 'File with the token (API key) that requests must have.'
  )
  names = flags.DEFINE_list(
    'names',
    [],
    'Additional host names that requests may use, such as that of a proxy.',
  )
  max_mib = flags.DEFINE_integer(
    'max_request_mib', 8, 'Largest request in MiB.', lower_bound=1
  )
  max_rate = flags.DEFINE_float(
    'max_requests_per_sec',
    1000.0,
    'Highest rate of requests of all clients.',
    lower_bound=1.0,
  )
  lines.refuse_nan(max_rate.name)
  train_run = train.make_train()

  def run(config, workdir: str) -> None:
    _check(config.env.name, host.value, token_file.value)
    token = _read_token(token_file.value)
    from gigpo_jax.run import serving
    from gigpo_jax.runtime import web

    with web.listen(host.value, port.value) as listening:
      open_pool = functools.partial(
        serving.open_pool,
        listening=listening,
        host=host.value,
        names=names.value,
        token=token,
        max_bytes=max_mib.value << 20,
        max_requests_per_sec=max_rate.value,
      )
      train_run(config, workdir, open_pool=open_pool)

  command.run(run)


def _check(name: str, host: str, token_file: str | None) -> None:
  """Raises ValueError, in one line, if these flags do not allow a server."""
  # Imported here, because worker processes import this file.
  import envs

  if not (name and envs.harness(name)):
    raise ValueError(
      f'env.name={name}: has episodes of its own; must be that of a harness, '
      'as in configs/endpoint.py, or use launch/train.py'
    )
  if not token_file and not _is_loopback(host):
    raise ValueError(
      f'--host={host}: other machines can connect; needs --token_file'
    )


def _is_loopback(host: str) -> bool:
  import ipaddress

  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'


def _read_token(path: str | None) -> str:
  """Returns the token of a file; '' without a file."""
  if not path:
    return ''
  try:
    with open(path, encoding='ascii') as file:
      token = file.read().strip()
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(
      f'--token_file={path}: cannot be read ({error})'
    ) from error
  if len(token) < _MIN_TOKEN_CHARS or not token.isprintable() or ' ' in token:
    raise ValueError(
      f'--token_file={path}: must hold {_MIN_TOKEN_CHARS} or more printable '
      'characters without spaces'
    )
  return token


if __name__ == '__main__':
  main()
