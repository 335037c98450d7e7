"""The table of benchmarks/accelerator.py: measurements next to their limits.

Input: the results of the parts as dictionaries. A limit is computed from the
measured rates of matmuls and copies, at full use of all devices.
"""

from collections.abc import Iterator, Sequence


def render(
  records: Sequence[dict], statuses: Sequence[dict], shape: str
) -> str:
  """Returns the results as Markdown.

  Args:
    records: results; the last one with a part and a name counts.
    statuses: ends of parts; the last one of a part counts.
    shape: name of the model's shape.
  """
  latest = {(r['part'], r['name']): r for r in records}
  rates = latest.get(('rates', 'rates'), {})
  sections = [
    list(_limits(rates, shape)),
    list(_checks(latest)),
    list(_starts(latest)),
    list(_iteration(latest, rates)),
    list(_updates(latest, rates)),
    list(_decode(latest, rates)),
    list(_small(latest)),
    list(_others(latest)),
    list(_statuses({s['part']: s for s in statuses})),
  ]
  return '\n\n'.join('\n'.join(lines) for lines in sections if lines) + '\n'


def share(limit_secs: float | None, secs: float) -> str:
  """Returns a limit as a percentage of a measured time."""
  if limit_secs is None or not secs > 0:
    return ''
  return f'{limit_secs / secs:.0%}'


def _row(*cells: str) -> str:
  return f'| {" | ".join(cells)} |'


def _head(*cells: str) -> list[str]:
  return [_row(*cells), '|' + '---|' * len(cells)]


def _secs(amount: float, rates: dict, name: str) -> float | None:
  """Returns the seconds for an amount at a measured rate, if known."""
  return amount / rates[name] if name in rates else None


def _limits(rates: dict, shape: str) -> Iterator[str]:
  if not rates:
    return
  yield (
    f'{rates["devices"]} x {rates["device"]}, jax {rates["jax"]}, shape '
    f'{shape}. A device: {rates["matmul"] / 1e12:.2f} TFLOP/s for matmuls of '
    f'{rates["dtype"]} matrices, {rates["copy"] / 1e9:.0f} GB/s copied. All '
    'numbers are measured; limits are computed from these two rates.'
  )


def _checks(latest: dict) -> Iterator[str]:
  checks = {k[1]: r for k, r in latest.items() if k[0] == 'check'}
  if not checks:
    return
  yield from _head('kernel', 'error of the output', 'of gradients (q, k, v)')
  for name, r in checks.items():
    output, *gradients = (f'{error:.1e}' for error in r['errors'])
    yield _row(name, output, ', '.join(gradients))


def _starts(latest: dict) -> Iterator[str]:
  found = {k[0]: r for k, r in latest.items() if k[1] == 'start'}
  if not found:
    return
  yield from _head(
    'start',
    'programs',
    'from the cache',
    'sum of compilations s',
    'to first rollout s',
  )
  for name, r in found.items():
    yield _row(
      name,
      f'{r["programs"]}',
      f'{r["cached"]}',
      f'{r["compile_secs"]:.1f}',
      f'{r["secs"]:.1f}',
    )


def _iteration(latest: dict, rates: dict) -> Iterator[str]:
  phases = [
    r
    for k, r in latest.items()
    if k[0].startswith('iteration') and k[1] != 'start'
  ]
  if not phases:
    return
  yield from _head(
    'iteration', 'fields', 's', 'limit s', 'of the limit', 'remarks'
  )
  for r in phases:
    name = r['name']
    limit, remarks = None, []
    if name == 'rollout':
      prefill = _secs(r['prefill_flops'], rates, 'matmul')
      reads = _secs(r['decode_bytes'], rates, 'copy')
      limit = None if prefill is None else prefill + reads
      remarks = [
        f'{r["episodes"]} episodes of {r["turns"]:.1f} turns of '
        f'{r["prompt_tokens"]:.0f} + {r["response_tokens"]:.0f} tokens',
        f'slots used {r["rollout/slot_occupancy"]:.0%}',
        f'waiting for the host {r["rollout/host_wait_share"]:.0%}',
        f'for environments {r["rollout/env_wait_share"]:.0%}',
      ]
    elif name == 'learner':
      limit = _secs(r['flops'], rates, 'matmul')
      remarks = ['log-probs and update', f'remat {r["remat"]}']
      if r['padding'] is not None:
        remarks += [f'padding {r["padding"]:.0%}']
      if r['peak_gib']:
        remarks += [f'peak {r["peak_gib"]:.1f} GiB']
      if r['gap'] is not None:
        remarks += [f'log-probs differ by {r["gap"]:.1e} from the sampler']
    remarks += [f'compilations {r["compilations"]}']
    yield _row(
      name,
      f'`{r["flags"]}`' if r['flags'] else '',
      f'{r["secs"]:.2f}',
      '' if limit is None else f'{limit:.2f}',
      share(limit, r['secs']),
      ', '.join(remarks),
    )


def _updates(latest: dict, rates: dict) -> Iterator[str]:
  found = [r for k, r in latest.items() if k[0].startswith('update')]
  if not found:
    return
  yield from _head(
    'mini-batch',
    'remat',
    'flags',
    'compiling s',
    's',
    'tokens/s',
    'of matmul',
    'peak GiB',
  )
  for r in found:
    yield _row(
      r['name'],
      r['remat'],
      f'`{r["flags"]}`' if r['flags'] else '',
      f'{r["compile_secs"]:.1f}',
      f'{r["secs"]:.2f}',
      f'{r["tokens"] / r["secs"]:,.0f}',
      share(_secs(r['flops'], rates, 'matmul'), r['secs']),
      f'{r["peak_gib"]:.1f}' if r['peak_gib'] else '',
    )


def _decode(latest: dict, rates: dict) -> Iterator[str]:
  found = [r for k, r in latest.items() if k[0].startswith('decode')]
  if not found:
    return
  yield from _head(
    'slots',
    'prompt',
    'flags or fields',
    'decode ms/step',
    'tokens/s',
    'of copy',
    'prefill tokens/s',
    'of matmul',
  )
  for r in found:
    prefill = r['prefill_secs']
    yield _row(
      f'{r["slots"]}',
      f'{r["prompt"]}',
      f'`{r["flags"]}`' if r['flags'] else '',
      f'{1e3 * r["step_secs"]:.2f}',
      f'{r["slots"] / r["step_secs"]:,.0f}',
      share(_secs(r['step_bytes'], rates, 'copy'), r['step_secs']),
      f'{r["slots"] * r["prompt"] / prefill:,.0f}' if prefill > 0 else '',
      share(_secs(r['prefill_flops'], rates, 'matmul'), prefill),
    )


def _small(latest: dict) -> Iterator[str]:
  found = [r for k, r in latest.items() if k[0] == 'small']
  if not found:
    return
  yield from _head('small run', 'rollout s', 'update s', 'iteration s', 'slots')
  for r in found:
    yield _row(
      r['name'],
      f'{r["time/rollout_secs"]:.2f}',
      f'{r["time/update_secs"]:.2f}',
      f'{r["time/iteration_secs"]:.2f}',
      f'{r["rollout/slot_occupancy"]:.0%}',
    )


def _others(latest: dict) -> Iterator[str]:
  found = [r for k, r in latest.items() if k[0] == 'torch']
  if not found:
    return
  yield from _head('transformers on PyTorch', 'tokens/s')
  for r in found:
    yield _row(r['name'], f'{r["tokens_per_sec"]:,.0f}')


def _statuses(statuses: dict[str, dict]) -> Iterator[str]:
  yield from _head('part', 'end', 's', 'error or last line')
  for name, s in statuses.items():
    last = '' if s['status'] == 'done' else s['last'].replace('|', '/')
    yield _row(name, s['status'], f'{s["secs"]:.0f}', last)
