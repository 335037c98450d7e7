"""Count the bytes that devices exchange, from the text of a compiled program.

XLA prints a compiled program as computations of operations. A loop or a branch
is an operation that names other computations.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

_COMPUTATION = re.compile(r'^(?:ENTRY )?%?([\w.-]+) (?:\([^{]*\) -> .*)?\{$')
_OPERATION = re.compile(r'\s+(ROOT )?%?([\w.-]+) = (.*?) ([\w-]+)\((.*)')
_NAME = re.compile(r'%([\w.-]+)')
_SHAPE = re.compile(r'(pred|[a-z]+\d+)\[([\d,]*)\]')
_CHANNEL = re.compile(r'channel_id=(\d+)')
_CALLED = re.compile(r'(?:body|calls|to_apply)=%?([\w.-]+)')
_CONDITION = re.compile(r'condition=%?([\w.-]+)')
_BRANCHES = re.compile(r'(?:branch|true|false)_computations?=\{?([^}]*?)[}\s]')
_TRIPS = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_INDEX = re.compile(r'index=(\d+)')
_BYTES = {'pred': 1, 'bf16': 2, 's8': 1, 'u8': 1, 's64': 8, 'u64': 8, 'f64': 8}
# Operations whose output is their input, for the counter of a loop.
_COPIES = ('copy', 'bitcast', 'convert', 'reshape')


@dataclasses.dataclass(frozen=True)
class _Operation:
  """One operation.

  Attributes:
    name: its name, unique in the program.
    shape: text of the output's shape.
    kind: 'add', 'while', 'all-gather-start', ...
    text: operands and attributes.
    is_root: whether it is the result of its computation.
  """

  name: str
  shape: str
  kind: str
  text: str
  is_root: bool

  @property
  def operands(self) -> list[str]:
    """Returns the names of the operands."""
    depth = 1
    for end, character in enumerate(self.text):
      depth += (character == '(') - (character == ')')
      if not depth:
        return _NAME.findall(self.text[:end])
    return _NAME.findall(self.text)


def exchange_bytes(text: str, *, trips: int = 1) -> dict[str, float]:
  """Returns the bytes that a device receives in one run, by kind.

  Kinds are 'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all' and
  'collective-permute'. A device receives the output of an all-gather without
  its own part, the input of a reduce-scatter without its own part, and both for
  an all-reduce, which counts as twice its size. A collective in a loop counts
  once per trip. Of several branches, the largest counts.

  Args:
    text: HLO text of the compiled program.
    trips: trips of a loop whose number of trips depends on the data.
  """
  by_kind: dict[str, float] = collections.defaultdict(float)
  for (kind, _), size in _Program(text, trips).received().items():
    by_kind[kind] += size
  return dict(by_kind)


class _Program:
  """The computations of a program."""

  def __init__(self, text: str, trips: int):
    self._default_trips = trips
    self._computations: dict[str, dict[str, _Operation]] = {}
    self._entry, name = '', ''
    for line in text.splitlines():
      if line and not line[0].isspace():
        if match := _COMPUTATION.match(line):
          name = match[1]
          self._computations[name] = {}
          self._entry = name if line.startswith('ENTRY') else self._entry
      elif name and (match := _OPERATION.match(line)):
        root, output, shape, kind, rest = match.groups()
        self._computations[name][output] = _Operation(
          output, shape, kind, rest, bool(root)
        )

  def received(self) -> dict[tuple[str, str], float]:
    """Returns received bytes by (kind, identifier of the collective)."""
    return self._received(self._entry, False)

  @functools.cache  # noqa: B019
  def _received(
    self, computation: str, in_fusion: bool
  ) -> dict[tuple[str, str], float]:
    """Returns received bytes of one run of a computation.

    XLA splits an asynchronous collective over several fusions with the same
    channel, some of them in loops. It is received once, where it starts.

    Args:
      computation: name of the computation.
      in_fusion: whether it is the body of a fusion.
    """
    sums: dict[tuple[str, str], float] = {}
    for operation in self._computations.get(computation, {}).values():
      for found in self._parts(computation, operation, in_fusion):
        for key, size in found.items():
          if key[1].startswith('channel') and key in sums:
            sums[key] = min(sums[key], size)
          else:
            sums[key] = sums.get(key, 0.0) + size
    return sums

  def _parts(
    self, computation: str, operation: _Operation, in_fusion: bool
  ) -> Iterator[dict[tuple[str, str], float]]:
    """Yields the received bytes of one operation."""
    kind = operation.kind.removesuffix('-start')
    if kind in _RECEIVED:
      channel = _CHANNEL.search(operation.text)
      fused = in_fusion and channel
      name = f'channel {channel[1]}' if fused else operation.name
      yield {(kind, name): self._received_once(computation, operation, kind)}
      return
    if match := _BRANCHES.search(operation.text):
      names = _NAME.findall(operation.text[match.start() :])
      branches = [self._received(name, False) for name in names]
      yield max(branches, key=lambda sizes: sum(sizes.values()))
    trips = self._trips(computation, operation)
    for called in _CALLED.findall(operation.text):
      inner = self._received(called, operation.kind == 'fusion')
      yield {key: trips * size for key, size in inner.items()}

  def _received_once(
    self, computation: str, operation: _Operation, kind: str
  ) -> float:
    operations = self._computations[computation]
    inputs = [
      _sizes(operations[name].shape)
      for name in operation.operands
      if name in operations
    ]
    input_size = sum(map(sum, inputs))
    outputs = _sizes(operation.shape)
    if operation.kind.endswith('-start') and kind != 'all-reduce':
      # The output of such a start also holds its inputs, and flags.
      outputs = [*_sizes(operation.shape.replace('u32[]', '')), -input_size]
    return _RECEIVED[kind](input_size, sum(outputs))

  # Trips of loops.

  def _trips(self, computation: str, operation: _Operation) -> int:
    """Returns how often an operation runs the computation that it calls."""
    if operation.kind != 'while':
      return 1
    if match := _TRIPS.search(operation.text):
      return int(match[1])
    condition = _CONDITION.search(operation.text)
    body = _CALLED.search(operation.text)
    limits = self._computations.get(condition[1], {})
    compared = next((o for o in limits.values() if o.kind == 'compare'), None)
    counter, limit = None, None
    for name in compared.operands if compared else ():
      constant = self._constant(condition[1], name)
      limit = constant if limit is None else limit
      index = self._tuple_index(condition[1], name)
      counter = index if counter is None else counter
    if limit is None:
      constants = (self._constant(condition[1], name) for name in limits)
      limit = max((c for c in constants if c is not None), default=None)
    if limit is None:
      return self._default_trips
    step = self._step(body[1], counter)
    start = self._start(computation, operation, counter)
    return max(1, math.ceil((limit - start) / step))

  def _find(self, computation: str, name: str) -> _Operation | None:
    """Returns the operation behind a value and its copies."""
    operation = self._computations[computation].get(name)
    while operation and operation.kind in _COPIES and operation.operands:
      operation = self._computations[computation].get(operation.operands[0])
    return operation

  def _constant(self, computation: str, name: str) -> int | None:
    operation = self._find(computation, name)
    if operation is None or operation.kind != 'constant':
      return None
    match = re.match(r'(-?\d+)\)', operation.text)
    return int(match[1]) if match else None

  def _tuple_index(self, computation: str, name: str) -> int | None:
    operation = self._find(computation, name)
    if operation is None:
      return None
    if operation.kind == 'parameter':  # The loop has no other value.
      return 0
    if operation.kind != 'get-tuple-element':
      return None
    return int(_INDEX.search(operation.text)[1])

  def _element(
    self, computation: str, operation: _Operation | None, index: int
  ) -> _Operation | None:
    """Returns the operation behind an element of a tuple."""
    if operation is None or operation.kind != 'tuple':
      return operation if index == 0 else None
    return self._find(computation, operation.operands[index])

  def _step(self, body: str, counter: int | None) -> int:
    """Returns what a trip adds to the counter; 1 if that is not visible."""
    operations = self._computations.get(body, {})
    root = next((o for o in operations.values() if o.is_root), None)
    if counter is None or root is None:
      return 1
    step, operation = 0, self._element(body, root, counter)
    while operation is not None and operation.kind == 'add':
      constants = [self._constant(body, name) for name in operation.operands]
      step += next((c for c in constants if c is not None), 0)
      others = [
        name
        for name, constant in zip(operation.operands, constants, strict=True)
        if constant is None
      ]
      operation = self._find(body, others[0]) if others else None
    return max(step, 1)

  def _start(
    self, computation: str, operation: _Operation, counter: int | None
  ) -> int:
    """Returns the counter's first value; 0 if that is not visible."""
    if counter is None:
      return 0
    initial = self._find(computation, operation.operands[0])
    element = self._element(computation, initial, counter)
    if element is None:
      return 0
    return self._constant(computation, element.name) or 0


# Bytes that a device receives, from the sizes of input and output.
_RECEIVED = {
  'all-gather': lambda input_size, output_size: (
    max(output_size - input_size, 0) if input_size < output_size else 0
  ),
  'all-reduce': lambda _, output_size: 2 * output_size,
  'reduce-scatter': lambda input_size, output_size: (
    max(input_size, output_size) - min(input_size, output_size)
  ),
  'all-to-all': lambda _, output_size: output_size,
  'collective-permute': lambda _, output_size: output_size,
}


def _sizes(shape: str) -> list[float]:
  """Returns the bytes of each array in the text of a shape."""
  return [
    _BYTES.get(dtype, 4) * math.prod(int(x) for x in dimensions.split(',') if x)
    for dtype, dimensions in _SHAPE.findall(shape)
  ]
