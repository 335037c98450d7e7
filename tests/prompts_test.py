"""Tests of ALFWorld's prompts and of the parsing of responses."""

import pytest

from envs import narrator, turns
from envs.alfworld import prompts

TAIL = 'x' * 40 + 'go to desk 1'


def _parse(response: str, *, require_think: bool = True) -> tuple[str, bool]:
  return turns.parse(
    response,
    require_think=require_think,
    unparsed_characters=prompts.UNPARSED_CHARACTERS,
  )


@pytest.mark.parametrize(
  ('response', 'action', 'valid'),
  [
    ('<think>a</think><action>Go To Desk 1</action>', 'go to desk 1', True),
    ('<think>a</think> <action>\n look \n</action>.', 'look', True),
    # The action is between the first <action> and the first </action> after it.
    (
      '</action><think></think><action>look</action><action>inventory</action>',
      'look',
      True,
    ),
    # Without a closing tag, without an opening tag, or with both in the wrong
    # order: the action is the last 30 characters.
    ('<think>a</think><action>' + TAIL, TAIL[-30:], False),
    (
      '<think>a</think>' + TAIL + '</action>',
      (TAIL + '</action>')[-30:],
      False,
    ),
    ('</action> then <action>', '</action> then <action>', False),
    # <think> is missing, is not closed, or is closed without being opened.
    ('<action>look</action>', '<action>look</action>', False),
    ('<think><action>look</action>', '<think><action>look</action>', False),
    ('</think><action>look</action>', '</think><action>look</action>', False),
    # CJK characters anywhere: ideographs, kana, hangul.
    ('<think>好</think><action>look</action>', None, False),
    ('<think>の</think><action>look</action>', None, False),
    ('<think>한</think><action>look</action>', None, False),
    ('<think>é ü</think><action>look</action>', 'look', True),
    ('', '', False),
  ],
)
def test_parsing_responses(response: str, action: str | None, valid: bool):
  expected = response.lower()[-30:] if action is None else action
  assert _parse(response) == (expected, valid)


def test_think_tags_can_be_optional():
  response = '<action>look</action>'
  assert _parse(response, require_think=False) == ('look', True)


def test_split_task():
  text = (
    '-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. '
    'Looking quickly around you, you see a bed 1.\n\n'
    'Your task is to: put a mug in desk.'
  )
  observation, task = prompts.split_task(text)
  assert observation.startswith('You are in the middle of a room.')
  assert observation.endswith('you see a bed 1.')
  assert task == 'put a mug in desk.'
  with pytest.raises(ValueError, match='no "Your task is to: "'):
    prompts.split_task('You see nothing.')


@pytest.mark.parametrize('style', narrator.STYLES)
def test_first_prompt_has_task_observation_and_actions(style: str):
  prompt = prompts.build(
    task='put a mug in desk.',
    observation='You see a bed 1.',
    actions=prompts.listed(('go to bed 1', 'help', 'look')),
    history=(),
    step=0,
    style=style,
  )
  for part in ('put a mug in desk.', 'You see a bed 1.', 'go to bed 1'):
    assert part in prompt
  assert 'help' not in prompt


def test_later_paper_prompt_numbers_past_turns():
  prompt = prompts.build(
    task='put a mug in desk.',
    observation='Third sight.',
    actions=('look',),
    history=(
      turns.Turn('First sight.', 'go to bed 1'),
      turns.Turn('Second sight.', 'go to desk 1'),
    ),
    step=4,
  )
  assert 'already taken 4 step(s)' in prompt
  assert "[Observation 3: 'First sight.', Action 3: 'go to bed 1']" in prompt
  assert "[Observation 4: 'Second sight.', Action 4: 'go to desk 1']" in prompt
  assert 'at step 5 and your current observation is: Third sight.' in prompt
  assert '<think> </think>' in prompt
  assert '<action> </action>' in prompt


def test_think_instruction_is_omitted_if_not_required():
  prompt = prompts.build(
    task='t',
    observation='o',
    actions=('look',),
    history=(),
    step=0,
    require_think=False,
  )
  assert '<think>' not in prompt


def test_short_prompts_have_the_last_turns_if_there_are_any():
  transcript = narrator.Transcript(
    lambda history, **_: ' '.join(turn.action for turn in history),
    history_length=4,
    short_history_length=3,
  )
  transcript.reset('task')
  shown = []
  for action in ('a', 'b', 'c', 'd'):
    shown.append(transcript.observe('', anchor='', actions=()).short_prompt)
    transcript.record_action(action)
  assert shown == ['', 'a', 'a b', 'a b c']
