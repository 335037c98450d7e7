"""Tests of the ALFWorld environment."""

import pytest

from envs import base
from envs.alfworld import env as alfworld_env
from envs.alfworld import expert, games

SMALL = {'receptacles': (5, 8)}
TASK = base.Task('train', 3)


def _env(**kwargs) -> alfworld_env.Env:
  return alfworld_env.Env(engine='native', generator=SMALL, **kwargs)


def _respond(action: str) -> str:
  return f'<think>so</think><action>{action}</action>'


def test_plan_wins_with_reward_10_at_the_end():
  env = _env()
  env.reset(TASK)
  results = [env.step(_respond(c)) for c in expert.plan(env.game(TASK))]
  assert [r.reward for r in results] == [0.0] * (len(results) - 1) + [10.0]
  assert [r.success for r in results] == [False] * (len(results) - 1) + [True]
  assert results[-1].done and results[-1].observation is None
  assert results[-1].final_anchor.startswith('You ')
  assert all(r.valid for r in results)
  assert all(r.metrics['inadmissible_action_rate'] == 0 for r in results)


def test_step_limit_ends_an_episode_without_reward():
  env = _env(max_steps=3)
  env.reset(TASK)
  results = [env.step(_respond('look')) for _ in range(3)]
  assert [r.done for r in results] == [False, False, True]
  assert sum(r.reward for r in results) == 0
  assert not results[-1].success


def test_invalid_response_is_played_and_marked():
  env = _env()
  env.reset(TASK)
  result = env.step('I look around.')
  assert not result.valid and not result.done
  assert result.observation.text == 'Nothing happens.'
  assert result.metrics['inadmissible_action_rate'] == 1


@pytest.mark.parametrize('required', [False, True])
def test_inadmissible_action_is_invalid_if_required(required: bool):
  env = _env(require_admissible=required)
  env.reset(TASK)
  assert env.step(_respond('fly to moon 1')).valid is not required
  assert not env.step('look').valid  # admissible, but without tags


def test_history_holds_the_last_k_turns():
  env = _env(history_length=2, prompt_style='paper')
  first = env.reset(TASK)
  assert 'Before this step' not in first.prompt
  observations = [
    env.step(_respond(c)).observation for c in ('look', 'inventory')
  ]
  assert "Action 1: 'look'" in observations[0].prompt
  third = env.step(_respond('look')).observation
  assert "Action 2: 'inventory'" in third.prompt
  assert "Action 3: 'look'" in third.prompt
  assert 'Action 1:' not in third.prompt
  assert 'Action' not in third.short_prompt.replace('actions', '')


def test_reset_is_independent_of_earlier_episodes():
  env = _env()
  first = env.reset(TASK)
  env.step(_respond('look'))
  env.reset(base.Task('train', 4))
  assert env.reset(TASK) == first
  assert _env().reset(TASK) == first


def test_anchor_modes():
  plain, full = _env(), _env(anchor='observation_and_actions')
  short, long = plain.reset(TASK), full.reset(TASK)
  assert short.anchor != long.anchor
  assert long.anchor.startswith(short.anchor)
  assert 'inventory' in long.anchor.splitlines()
  # A revisited state has the same anchor.
  anchors = [
    env.step(_respond('look')).observation.anchor for env in (plain, plain)
  ]
  assert anchors[0] == anchors[1]
  with pytest.raises(ValueError, match='anchor=x: must be one of'):
    _env(anchor='x')


def _anchors(task: base.Task, commands, anchor: str = 'state') -> list[str]:
  env = _env(anchor=anchor, max_steps=50)
  first = env.reset(task).anchor
  results = [env.step(_respond(command)) for command in commands]
  return [
    first,
    *(
      r.observation.anchor if r.observation else r.final_anchor for r in results
    ),
  ]


def test_failed_action_stays_in_its_state():
  plan = expert.plan(_env().game(TASK))
  expected = _anchors(TASK, plan)
  tried = [c for command in plan for c in ('fly to moon 1', command)]
  actual = _anchors(TASK, tried)
  assert actual[::2] == expected
  assert actual[1::2] == expected[:-1]
  # The anchors of observations cannot tell where the action failed.
  assert len(set(_anchors(TASK, tried, 'observation')[1::2])) == 1


def test_state_tells_what_the_agent_holds():
  env = _env(anchor='state')
  plan = list(expert.plan(env.game(TASK)))
  take = next(n for n, c in enumerate(plan) if c.startswith('take'))
  for anchor, differs in (('observation', False), ('state', True)):
    # The same observation with empty hands and with the object.
    hands = [
      _anchors(TASK, [*plan[:take], *moves, 'look'], anchor)[-1]
      for moves in ([], [plan[take]])
    ]
    assert (hands[0] != hands[1]) == differs


def _first_task(env: alfworld_env.Env, task_type: str) -> base.Task:
  return next(
    task
    for index in range(200)
    if env.game(task := base.Task('train', index)).goal.task_type == task_type
  )


@pytest.mark.parametrize('verb', ['heat', 'cool', 'clean'])
def test_state_remembers_a_hidden_effect(verb: str):
  env = _env(anchor='state', max_steps=50)
  task = _first_task(env, f'pick_{verb}_then_place_in_recep')
  plan = list(expert.plan(env.game(task)))
  treat = next(n for n, c in enumerate(plan) if c.startswith(verb))
  treated = _anchors(task, plan[: treat + 2])[-1]
  plain = _anchors(task, [*plan[:treat], plan[treat + 1]])[-1]
  assert treated.startswith(f'You {verb}') and treated.endswith(plain)
  assert treated != plain
  # The next episode does not remember it.
  first = env.reset(task).anchor
  for command in plan[: treat + 1]:
    env.step(_respond(command))
  assert env.reset(task).anchor == first


def test_state_remembers_that_the_lamp_is_on():
  env = _env()
  task = _first_task(env, 'look_at_obj_in_light')
  plan = expert.plan(env.game(task))
  to_lamp = [command for command in plan if command.startswith('go to ')][-1]
  use = next(command for command in plan if command.startswith('use '))
  away = next(
    action
    for action in env.reset(task).actions
    if action.startswith('go to ') and action != to_lamp
  )
  lit, dark = (
    _anchors(task, [to_lamp, *uses, away])[-1] for uses in ([use], [])
  )
  assert lit.startswith('You turn on') and lit.endswith(dark)


def test_the_sweeping_expert_does_not_depend_on_the_seed():
  sweep, other = _env(expert_order='sweep'), _env()

  def play(env, seed):
    return [
      list(env.demonstrate(base.Task('train', index), noise=0.0, seed=seed))
      for index in range(5)
    ]

  assert play(sweep, 0) == play(sweep, 1) != play(other, 0) != play(other, 1)


def test_mistakes_never_ask_for_help():
  env = _env(max_steps=50)
  responses = [
    response
    for index in range(5)
    for _, response in env.demonstrate(
      base.Task('train', index), noise=1.0, seed=0
    )
  ]
  assert len(responses) > 100
  assert not any('<action>help</action>' in r for r in responses)


def test_demonstrations_win_and_are_reproducible():
  env = _env(max_steps=50)
  wins = 0
  for index in range(20):
    task = base.Task('train', index)
    pairs = list(env.demonstrate(task, noise=0.0, seed=0))
    assert pairs == list(env.demonstrate(task, noise=0.0, seed=0))
    wins += len(pairs) < 50
    for _, response in pairs:
      assert response.startswith('<think>')
      assert response.endswith('</action>')
  assert wins == 20


def test_noise_makes_the_expert_err():
  env = _env(max_steps=50)
  task = base.Task('train', 0)
  steps = [
    sum(
      len(list(env.demonstrate(base.Task('train', i), noise=noise, seed=0)))
      for i in range(10)
    )
    for noise in (0.0, 0.6)
  ]
  assert steps[0] < steps[1]
  assert list(env.demonstrate(task, noise=0.6, seed=0)) != list(
    env.demonstrate(task, noise=0.6, seed=1)
  )


def test_unknown_engine_is_refused():
  with pytest.raises(ValueError, match='env.engine=x: unknown engine; known'):
    alfworld_env.Env(engine='x')


def test_preparing_a_game_of_an_older_release_keeps_the_episode(tmp_path):
  env = _env()
  for index in range(2):
    game = env.game(base.Task('train', index))
    path = games.write_game(game, tmp_path / 'train' / str(index))
    if index:
      old = path.read_text().replace(
        r'\"move {o} to {r}\"', r'\"put {o} in/on {r}\"'
      )
      path.write_text(old)
  env = alfworld_env.Env(
    data_dir=str(tmp_path), generator={'expected_counts': False}
  )
  tasks = [base.Task('train', index) for index in range(2)]
  listed = env.reset(tasks[0]).actions
  env.prepare(tasks[1])
  assert env.step(_respond('help')).observation.actions == listed
  env.reset(tasks[1])
  assert env.step(_respond('help')).observation.text == 'Nothing happens.'
