"""Chat templates for tests of conversations."""

# As Qwen3's: thinking before the last user message is dropped, tools are
# listed, and without thinking a response starts with an empty thought.
QWEN3 = (
  "{%- if tools %}{{ '<|im_start|>system\n' }}"
  "{%- for tool in tools %}{{ (tool | tojson) + '\n' }}{% endfor %}"
  "{{- '<|im_end|>\n' }}{% endif %}"
  '{%- set ns = namespace(last=0) %}{%- for m in messages %}'
  "{%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
  '{%- endfor %}{%- for m in messages %}'
  "{%- if m.role == 'tool' %}{{ '<|im_start|>user\n<tool_response>\n' + "
  "m.content + '\n</tool_response>' }}"
  "{%- elif m.role != 'assistant' %}"
  "{{- '<|im_start|>' + m.role + '\n' + m.content }}{% else %}"
  "{%- set parts = m.content.split('</think>') %}"
  "{{- '<|im_start|>assistant\n' }}"
  '{%- if parts | length > 1 and loop.index0 > ns.last %}'
  "{{- '<think>\n' + parts[0].split('<think>')[-1].strip('\n') + "
  "'\n</think>\n\n' }}{% endif %}"
  "{{- parts[-1].lstrip('\n') }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
  "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
  "{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
  '{% endif %}'
)
