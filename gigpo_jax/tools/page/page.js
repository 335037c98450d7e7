'use strict';
// Insert texts from models and environments by textContent only, never as HTML.

const run = { facts: {}, metrics: [], iterations: [] };
const now = { iteration: null, data: null, group: 0, marked: null, request: 0, runText: '' };
const charts = [
  { title: 'success', train: 'train/success_rate', held: 'eval/success_rate',
    low: 'eval/success_low', high: 'eval/success_high', percent: true },
  { title: 'score', train: 'train/score', held: 'eval/score', percent: true },
  { title: 'episode reward', train: 'train/episode_reward' },
  { title: 'episode length (steps)', train: 'train/episode_length' },
  { title: 'invalid actions', train: 'train/invalid_action_rate', percent: true },
];

const find = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const svg = ['svg', 'path', 'line', 'circle', 'text', 'polygon'].includes(tag);
  const element = svg
    ? document.createElementNS('http://www.w3.org/2000/svg', tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// Invisible characters and those that change text direction are shown as code
// points. The zero-width joiner and non-joiner stay: scripts and emoji need
// them.
const HIDDEN = /(?![\t\n\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

function words(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(HIDDEN)) {
    parts.push(text.slice(end, match.index));
    const code = match[0].codePointAt(0).toString(16).padStart(4, '0');
    parts.push(make('span', { class: 'escape' }, `u${code}`));
    end = match.index + match[0].length;
  }
  parts.push(text.slice(end));
  const fragment = document.createDocumentFragment();
  fragment.append(...parts);
  return fragment;
}

const number = (value, digits = 2) =>
  value === null || value === undefined ? '–'
    : `${value < 0 ? '−' : ''}${Math.abs(value).toFixed(digits)}`;
const signed = (value) =>
  value === null ? '–' : value > 0 ? `+${value.toFixed(2)}` : number(value);

async function load(path) {
  const part = document.querySelector(`script[data-part="${path}"]`);
  if (part) {
    const packed = Uint8Array.from(atob(part.textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
    return JSON.parse(await new Response(stream).text());
  }
  const response = await fetch(`${path}.json`);
  const data = await response.json();
  if (!response.ok) throw new Error(data.error || response.statusText);
  return data;
}
const exported = () => document.querySelector('script[data-part]') !== null;

// Learning curves.

const WIDTH = 240, HEIGHT = 84, LEFT = 30, BOTTOM = 14;

function series(name) {
  return run.metrics
    .filter((line) => Number.isFinite(line[name]))
    .map((line) => [line.iteration, line[name]]);
}

function format(value, percent) {
  if (percent) return `${(100 * value).toFixed(1)}%`;
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(1);
  return value.toFixed(size < 10 ? (size < 0.1 ? 4 : 2) : size < 100 ? 1 : 0);
}

function scaleOf(chart, lines) {
  const values = lines.flat().map((point) => point[1]);
  let low = Math.min(...values), high = Math.max(...values);
  // Shares fill the axis from 0; scores may lie outside of [0, 1].
  if (chart.percent) {
    low = Math.min(low, 0);
    high = high > 0.5 ? Math.max(high, 1) : Math.max(high * 1.15, 0) || (low < 0 ? 0 : 1);
  }
  if (low === high) { low -= Math.abs(low) / 2 || 0.5; high += Math.abs(high) / 2 || 0.5; }
  const all = run.metrics.map((line) => line.iteration);
  const first = Math.min(...all), last = Math.max(...all, first + 1);
  return {
    low, high, first, last,
    x: (i) => LEFT + (WIDTH - LEFT - 6) * (i - first) / (last - first),
    y: (v) => 5 + (HEIGHT - BOTTOM - 5) * (1 - (v - low) / (high - low)),
    at: (x) => first + (last - first) * (x - LEFT) / (WIDTH - LEFT - 6),
  };
}

// Returns what the chart shows at the selected iteration, and the chart.
function drawCurve(chart) {
  const train = series(chart.train), held = chart.held ? series(chart.held) : [];
  const low = chart.low ? series(chart.low) : [], high = chart.high ? series(chart.high) : [];
  const scale = scaleOf(chart, [train, held, low, high]);
  const path = (points) =>
    points.map(([i, v], n) => `${n ? 'L' : 'M'}${scale.x(i).toFixed(1)} ${scale.y(v).toFixed(1)}`).join('');
  const svg = make('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}` });
  for (const value of [scale.low, scale.high]) {
    const y = scale.y(value);
    svg.append(make('line', { class: 'grid', x1: LEFT, x2: WIDTH - 6, y1: y, y2: y }));
    svg.append(make('text', { x: LEFT - 4, y: y + 3, 'text-anchor': 'end' },
      chart.percent ? `${+(100 * value).toFixed(Math.abs(value) < 0.1 ? 2 : 0)}%` : format(value)));
  }
  for (const i of [scale.first, scale.last]) {
    svg.append(make('text', { x: scale.x(i), y: HEIGHT - 2, 'text-anchor': i === scale.first ? 'start' : 'end' }, `${i}`));
  }
  if (low.length > 1) {
    const band = [...low, ...high.slice().reverse()];
    svg.append(make('polygon', { class: 'band', points: band.map(([i, v]) => `${scale.x(i)},${scale.y(v)}`).join(' ') }));
  }
  svg.append(make('path', { class: held.length ? 'train' : 'eval', d: path(train) }));
  if (train.length === 1) svg.append(make('circle', { class: 'dot', cx: scale.x(train[0][0]), cy: scale.y(train[0][1]), r: 2.5 }));
  svg.append(make('path', { class: 'eval', d: path(held) }));
  for (const [i, v] of held) svg.append(make('circle', { cx: scale.x(i), cy: scale.y(v), r: 2.6 }));
  if (now.iteration !== null) {
    const x = scale.x(now.iteration);
    svg.append(make('line', { class: 'cursor', x1: x, x2: x, y1: 3, y2: HEIGHT - BOTTOM }));
  }
  const values = (i) => [[train, ''], [held, 'eval ']].flatMap(([points, label]) => {
    const point = i === null ? points.at(-1) : points.find(([other]) => other === i);
    return point ? [label + format(point[1], chart.percent)] : [];
  }).join(' · ');
  const nearest = (event, iterations) => {
    const box = svg.getBoundingClientRect();
    const wanted = scale.at((event.clientX - box.left) / box.width * WIDTH);
    return iterations.slice().sort((a, b) => Math.abs(a - wanted) - Math.abs(b - wanted))[0];
  };
  svg.addEventListener('mousemove', (event) => {
    const near = nearest(event, [...train, ...held].map(([i]) => i));
    svg.dataset.hint = `iteration ${near}: ${values(near)}`;
    showHint(svg);
  });
  svg.addEventListener('click', (event) => {
    const near = nearest(event, run.iterations);
    if (near !== undefined) choose(near);
  });
  return [make('span', { class: 'now' }, values(now.iteration)), svg];
}

function drawCurves() {
  const known = [...new Set(run.metrics.flatMap((line) =>
    Object.keys(line).filter((name) => Number.isFinite(line[name]))))]
    .filter((name) => name !== 'iteration').sort();
  find('charts').replaceChildren(...charts
    .filter((chart) => known.includes(chart.train))
    .map((chart) => {
      const [value, svg] = drawCurve(chart);
      return make('figure', { class: 'curve' }, make('header', {}, make('b', {}, chart.title), value), svg);
    }));
  // The list of metrics stays, so that it keeps the focus.
  const select = find('metric');
  if (select.length !== known.length) {
    const first = known.includes('loss/entropy') ? 'loss/entropy' : known.find((name) => name.startsWith('loss/'));
    const chosen = select.value || first;
    select.replaceChildren(...known.map((name) => make('option', { value: name }, name)));
    if (known.includes(chosen)) select.value = chosen;
  }
  find('chosen').hidden = !known.length;
  if (!known.length) return;
  const [value, svg] = drawCurve({ train: select.value });
  find('chosen').querySelector('.now').replaceWith(value);
  find('chosen').querySelector('svg').replaceWith(svg);
}

// Selection of iteration, group and episodes.

function filters() {
  return {
    outcome: find('outcome').value, kind: find('kind').value,
    text: find('text').value.toLowerCase(), invalid: find('invalid').checked,
  };
}

function fits(episode, wanted) {
  if (wanted.outcome === 'success' && !episode.success) return false;
  if (wanted.outcome === 'failure' && episode.success) return false;
  if (wanted.invalid && !episode.invalid) return false;
  if (!wanted.text) return true;
  return episode.steps.some((step) =>
    [step.action, step.observation, ...step.messages.map((m) => m[1]), step.tokens.map((t) => t[0]).join('')]
      .some((text) => text.toLowerCase().includes(wanted.text)));
}

function matching(group, wanted) {
  if (wanted.kind && group.kind !== wanted.kind) return [];
  const won = group.episodes.filter((episode) => episode.success).length;
  if (wanted.outcome === 'mixed' && (won === 0 || won === group.episodes.length)) return [];
  return group.episodes.filter((episode) => fits(episode, wanted));
}

// Load a group's steps on demand: when the group is shown, or for a text
// search.
function loadSteps(group) {
  const fill = (steps) => group.episodes.forEach((episode, n) => { episode.steps = steps[n]; });
  group.loading ||= load(`iterations/${now.data.iteration}/${group.group}`).then(fill)
    .catch((error) => { group.loading = null; throw error; }); // The next click tries again.
  return group.loading;
}

const outcome = (episode) => (episode.failure ? 'broken' : episode.success ? 'success' : '');

function dot(episode) {
  return make('span', { class: `dot-of ${outcome(episode)}` });
}

async function drawGroups() {
  const wanted = filters(), data = now.data, request = ++now.request;
  try {
    if (wanted.text) await Promise.all(data.groups.map(loadSteps));
    if (data !== now.data) return; // Another iteration was selected in the meantime.
    const shown = data.groups.filter((group) => matching(group, wanted).length);
    if (!shown.some((group) => group.group === now.group) && shown.length) now.group = shown[0].group;
    remember();
    const chosen = shown.find((group) => group.group === now.group);
    if (chosen) await loadSteps(chosen);
    if (request !== now.request) return; // A newer request has replaced this one.
    listGroups(shown);
    drawGroup(chosen, wanted);
  } catch (error) {
    fail(error);
  }
}

function fail(error) {
  find('group').replaceChildren(make('p', { class: 'none error' }, words(String(error.message))));
}

function listGroups(shown) {
  const focused = find('groups').contains(document.activeElement);
  find('groups').replaceChildren(...shown.map((group) =>
    make('li', {}, make('button', {
      'aria-current': String(group.group === now.group), 'data-group': group.group,
      onclick: () => { now.group = group.group; remember('pushState'); return drawGroups(); },
    },
    make('span', { class: 'title' },
      make('span', { class: 'kind' }, words(group.kind || group.task)),
      make('small', {}, words(group.task))),
    make('span', { class: 'dots' }, ...(group.teacher ? [] : group.episodes.map(dot)))))));
  if (!shown.length) find('groups').append(make('li', { class: 'none' }, 'No episode matches the filters.'));
  if (focused) find('groups').querySelector('[aria-current=true]')?.focus();
}

function drawGroup(group, wanted) {
  mark(null, true);
  if (!group) { find('group').replaceChildren(); return; }
  const shown = matching(group, wanted);
  const won = group.episodes.filter((episode) => episode.success).length;
  const states = new Map();
  for (const episode of group.episodes) {
    episode.steps.forEach((step, n) => {
      if (step.state < 0) return;
      if (!states.has(step.state)) states.set(step.state, []);
      states.get(step.state).push({ episode, step, n });
    });
  }
  find('group').replaceChildren(
    make('h2', {}, make('span', {}, group.teacher ? 'Rows of the teacher' : `Group ${group.group}`), group.teacher ? '' : words(group.kind),
      make('small', {}, words(group.task),
        group.teacher ? '' : ` · ${won} of ${group.episodes.length} succeeded`,
        shown.length < group.episodes.length ? ` · ${shown.length} shown` : '',
        group.teacher ? '' : ` · ${states.size} states`)),
    make('div', { class: 'episodes' }, ...shown.map((episode) =>
      group.teacher ? drawTeacherRow(episode, states) : drawEpisode(episode, states))));
}

function drawEpisode(episode, states) {
  const verdict = episode.failure ? 'aborted' : episode.success ? 'success' : 'no success';
  const score = episode.score === null ? '' : ` · score ${number(episode.score)}`;
  const ended = episode.failure || episode.end;
  return make('section', { class: `episode ${outcome(episode)}`, 'data-member': episode.member },
    make('header', {},
      make('b', {}, `Episode ${episode.member}`),
      make('span', { class: 'verdict' }, verdict),
      episode.trained ? null : make('span', { class: 'badge' }, 'not trained on'),
      make('span', { class: 'right' }, `return ${number(episode.return)}${score} · ${episode.steps.length} steps`)),
    ...episode.steps.map((step, n) => drawStep(episode, step, n, states)),
    ended ? make('div', { class: 'end' }, episode.failure ? '✕ ' : '■ ', words(ended)) : null);
}

// A row of a teacher has no environment: no outcome, action, reward or state.
// Demonstrations have no log-probs.
function drawTeacherRow(row, states) {
  const [given] = row.steps;
  const tokens = given.tokens.map(([text, logProb, count]) => [text, logProb ?? undefined, count]);
  return make('section', { class: 'episode teacher', 'data-member': row.member },
    make('header', {}, make('b', {}, `Row ${row.member}`)),
    drawStep(row, { ...given, tokens, action: 'response', reward: null }, 0, states));
}

const shade = (value, colours) => {
  const strength = Math.min(Math.abs(value) / 2, 1) * 0.72;
  return `rgba(var(${colours}), ${strength.toFixed(3)})`;
};

function chip(label, value, hint) {
  const element = make('span', { 'data-hint': hint }, make('i', {}, label), signed(value));
  if (value) element.style.background = shade(value, value > 0 ? '--above' : '--below');
  return element;
}

function drawTokens(tokens) {
  return tokens.map(([text, logProb, count]) => {
    const hint = logProb === undefined ? 'no log-prob'
      : logProb === null ? 'log-prob not finite'
      : `log-prob ${number(logProb, 3)} · ${(100 * Math.exp(logProb)).toPrecision(3)} %`;
    const element = make('span', {
      class: 'token',
      'data-hint': hint + (count > 1 ? ` · ${count} tokens` : ''),
    }, words(text));
    const strength = (logProb === null ? 1 : Math.min(-(logProb ?? 0) / 4, 1)) * 0.85;
    if (strength > 0.01) element.style.background = `rgba(var(--surprise), ${strength.toFixed(3)})`;
    return element;
  });
}

// Long episodes have many tokens, so tokens are drawn only when they come into
// view.
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting && entry.target.tokens) {
      entry.target.replaceChildren(...drawTokens(entry.target.tokens));
      entry.target.tokens = null;
    }
  }
}, { rootMargin: '500px' });

// Attributes of an element that a click or the Enter key activates.
const pressable = (act) => ({
  tabindex: 0, onclick: act,
  onkeydown: (event) => { if (event.key === 'Enter' && event.target === event.currentTarget) act(event); },
});

const unfold = pressable((event) => {
  if (!getSelection().toString()) event.currentTarget.classList.toggle('open');
});

function drawStep(episode, step, n, states) {
  const response = make('div', { class: 'response', ...unfold });
  if (step.advantage) response.style.borderLeftColor = `rgb(var(${step.advantage > 0 ? '--above' : '--below'}))`;
  // Complete text from the start, so that the browser's search finds it.
  response.append(words(step.tokens.map(([text]) => text).join('')));
  response.tokens = step.tokens;
  seen.observe(response);
  const prompt = make('details', { class: 'prompt' }, make('summary', {}, step.new_tokens < step.prompt_tokens
    ? `messages · ${step.new_tokens} of ${step.prompt_tokens} prompt tokens`
    : `prompt · ${step.prompt_tokens} tokens`));
  prompt.addEventListener('toggle', () => {
    if (prompt.open && prompt.children.length < 2) prompt.append(...step.messages.map(drawMessage));
  });
  const same = states.get(step.state) || [];
  const anchor = step.state < 0 ? null : make('button', {
    class: same.length > 1 ? 'anchor' : 'anchor alone',
    'data-hint': same.length > 1 ? 'steps taken in the same state' : 'the only step taken in this state',
    onmouseenter: () => { if (now.marked === null) light(step.state); },
    onmouseleave: () => { if (now.marked === null) light(null); },
    onclick: () => mark(now.marked === step.state ? null : step.state, false, same),
  }, `state ${step.state} · ${same.length}×`);
  return make('article', { class: 'step', 'data-state': step.state, id: stepId(episode, n) },
    make('header', {},
      make('span', { class: 'n' }, `${n}`),
      step.agent ? make('span', { class: 'badge', 'data-hint': 'the agent that took the step' }, words(step.agent)) : null,
      make('span', { class: 'action' }, words(step.action || '(no action)')),
      conversation(episode, step, n),
      step.valid ? null : make('span', { class: 'badge bad' }, 'invalid'),
      step.truncated ? make('span', { class: 'badge' }, 'truncated') : null,
      step.prompt_shortened ? make('span', { class: 'badge' }, 'prompt shortened') : null),
    make('p', { class: 'observation', ...unfold }, words(step.observation)),
    response,
    step.calls.length || step.problem ? make('div', { class: 'calls' },
      ...step.calls.map(drawCall), step.problem ? make('span', { class: 'badge bad' }, words(step.problem)) : null) : null,
    make('div', { class: 'numbers' },
      make('span', {}, make('i', {}, 'reward'), number(step.reward)),
      step.discounted_return === null ? null
        : make('span', { 'data-hint': 'discounted return from this step on, with the penalty of an invalid action' }, make('i', {}, 'return'), number(step.discounted_return)),
      step.episode_advantage === null ? null : chip('episode', step.episode_advantage, 'episode advantage: compared with the group'),
      step.step_advantage === null ? null : chip('step', step.step_advantage, 'step advantage: compared with steps from the same state'),
      step.advantage === null ? null : chip('total', step.advantage, 'total advantage: used in training')),
    make('div', { class: 'foot' }, prompt, anchor));
}

// A message that was added to the prompt.
function drawMessage([role, text]) {
  return make('div', { class: `message ${['system', 'user', 'tool', 'assistant'].includes(role) ? role : ''}` },
    role ? make('span', { class: 'role' }, words(role)) : null, make('pre', {}, words(text)));
}

function drawCall([name, given]) {
  const values = Object.entries(given).map(([key, value]) => `${key}: ${value}`);
  return make('code', { class: 'call', 'data-hint': 'tool call' }, words(`${name}(${values.join(', ')})`));
}

// Which conversation a step continues, if that is not the step before.
function conversation(episode, step, n) {
  if (n === 0 || step.continues === n - 1) return null;
  if (step.continues !== null) return make('span', { class: 'badge' }, `continues step ${step.continues}`);
  return episode.steps.some((other) => other.continues !== null)
    ? make('span', { class: 'badge' }, 'new conversation') : null;
}

const stepId = (episode, n) => `step-${episode.member}-${n}`;

function light(state) {
  const box = document.querySelector('.episodes');
  if (!box) return;
  box.classList.toggle('marking', state !== null);
  for (const card of box.querySelectorAll('.step')) {
    card.classList.toggle('same', state !== null && card.dataset.state === String(state));
  }
}

// Keep a state highlighted and list the steps taken in it.
function mark(state, quiet, same = []) {
  now.marked = state;
  if (!quiet) light(state);
  const panel = find('state');
  panel.hidden = state === null;
  if (state === null) return;
  const row = ({ episode, step, n }) => {
    const advantage = make('td', { class: 'number' }, signed(step.step_advantage));
    if (step.step_advantage) advantage.style.background = shade(step.step_advantage, step.step_advantage > 0 ? '--above' : '--below');
    return make('tr', pressable(() => visit(stepId(episode, n))),
      make('td', {}, `${episode.member}`, ' ', dot(episode)), make('td', { class: 'number' }, `${n}`),
      make('td', { class: 'words' }, words(step.action)),
      make('td', { class: 'number' }, number(step.discounted_return)), advantage);
  };
  panel.replaceChildren(
    make('header', {}, make('b', {}, `State ${state}`),
      make('small', {}, `${same.length} steps of this group were taken in this state`),
      make('button', { onclick: () => mark(null), title: 'close (Esc)' }, '✕')),
    make('pre', {}, words(same[0].step.anchor)),
    make('table', {},
      make('thead', {}, make('tr', {}, make('th', {}, 'episode'), make('th', { class: 'number' }, 'step'),
        make('th', {}, 'action'), make('th', { class: 'number' }, 'return'), make('th', { class: 'number' }, 'advantage'))),
      make('tbody', {}, ...same.map(row))));
}

function visit(id) {
  const card = find(id);
  if (!card) return;
  card.scrollIntoView({ block: 'center', inline: 'center' });
  card.classList.remove('flash');
  void card.offsetWidth;
  card.classList.add('flash');
}

// Show the selected iteration; disable the buttons at either end.
function drawSelection() {
  if (now.iteration === null) return;
  find('iteration').value = String(now.iteration);
  const at = run.iterations.indexOf(now.iteration);
  find('before').disabled = at <= 0;
  find('after').disabled = at >= run.iterations.length - 1;
}

async function choose(iteration, group = 0, kind = find('kind').value, change = 'pushState') {
  now.iteration = iteration;
  now.group = group;
  drawSelection();
  drawCurves();
  try {
    const data = await load(`iterations/${iteration}`);
    if (now.iteration !== iteration) return; // Another iteration was selected in the meantime.
    now.data = data;
  } catch (error) {
    if (now.iteration !== iteration) return;
    now.data = null;
    find('groups').replaceChildren();
    fail(error);
    return;
  }
  const taskTypes = [...new Set(now.data.groups.map((g) => g.kind))].sort();
  const select = find('kind');
  select.replaceChildren(make('option', { value: '' }, 'all'), ...taskTypes.map((t) => make('option', { value: t }, words(t))));
  select.value = taskTypes.includes(kind) ? kind : '';
  remember(change);
  await drawGroups();
}

// The page's address holds the selection and the filters.

function remember(change = 'replaceState') {
  if (location.protocol === 'about:') return; // In the iframe of a notebook.
  const selection = { iteration: now.iteration, group: now.group, ...filters() };
  const given = Object.entries(selection).filter(([, value]) => value !== '' && value !== false);
  const hash = `#${new URLSearchParams(given)}`;
  if (hash !== location.hash) history[change](null, '', hash);
}

// Show what the address names; without an iteration, the last one.
function restore() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of ['outcome', 'text']) find(name).value = given.get(name) ?? '';
  find('invalid').checked = given.has('invalid');
  const wanted = Number(given.get('iteration') ?? NaN);
  const iteration = run.iterations.includes(wanted) ? wanted : run.iterations.at(-1);
  return choose(iteration, Number(given.get('group') || 0), given.get('kind') ?? '', 'replaceState');
}

function move(by) {
  const next = run.iterations[run.iterations.indexOf(now.iteration) + by];
  if (next !== undefined) choose(next);
}

function moveGroup(by) {
  const buttons = [...document.querySelectorAll('#groups button')];
  const at = buttons.findIndex((button) => button.dataset.group === String(now.group));
  const next = buttons[at + by];
  if (next) { next.scrollIntoView({ block: 'nearest' }); next.click(); }
}

function success(iteration) {
  const line = run.metrics.find((metrics) => metrics.iteration === iteration);
  return line && Number.isFinite(line['train/success_rate'])
    ? ` · ${(100 * line['train/success_rate']).toFixed(0)}% success` : '';
}

function drawRun() {
  document.title = run.name;
  find('name').replaceChildren(words(run.name));
  find('facts').replaceChildren(...Object.entries(run.facts).map(([name, value]) =>
    make('span', {}, `${name} `, make('b', {}, words(String(value))))));
  find('iteration').replaceChildren(...run.iterations.map((i) =>
    make('option', { value: i }, `iteration ${i}${success(i)}`)));
  drawSelection();
  drawCurves();
}

async function refresh() {
  const data = await load('run').catch(() => null), text = JSON.stringify(data);
  if (!data || text === now.runText) return;
  now.runText = text;
  Object.assign(run, data);
  drawRun();
  if (now.iteration === null && run.iterations.length) await restore();
}

function listen() {
  find('before').addEventListener('click', () => move(-1));
  find('after').addEventListener('click', () => move(1));
  find('iteration').addEventListener('change', (event) => choose(Number(event.target.value)));
  find('filters').addEventListener('submit', (event) => event.preventDefault());
  find('filters').addEventListener('input', () => { if (now.data) drawGroups(); });
  find('metric').addEventListener('change', drawCurves);
  addEventListener('hashchange', () => { if (run.iterations.length) restore(); });
  document.addEventListener('keydown', (event) => {
    if (event.target.matches('input, select') || event.ctrlKey || event.metaKey) return;
    const act = { '[': () => move(-1), ']': () => move(1), j: () => moveGroup(1), k: () => moveGroup(-1), Escape: () => mark(null) }[event.key];
    if (act) act();
  });
  document.addEventListener('mouseover', (event) => showHint(event.target.closest?.('[data-hint]')));
}

function showHint(over) {
  const hint = find('hint');
  hint.hidden = !over;
  if (!over) return;
  hint.textContent = over.dataset.hint;
  const box = over.getBoundingClientRect();
  hint.style.left = `${Math.max(4, Math.min(box.left, innerWidth - hint.offsetWidth - 8))}px`;
  hint.style.top = `${box.top > 40 ? box.top - hint.offsetHeight - 5 : box.bottom + 5}px`;
}

async function start() {
  listen();
  try {
    const data = await load('run');
    now.runText = JSON.stringify(data);
    Object.assign(run, data);
  } catch (error) {
    find('curves').replaceChildren(make('p', { class: 'error' }, words(String(error.message))));
    return;
  }
  drawRun();
  if (!run.iterations.length) {
    find('group').replaceChildren(make('p', { class: 'none' },
      'This run kept no episodes; set --config.episodes.every=1 to keep the episodes of every iteration.'));
  } else {
    await restore();
  }
  if (!exported()) setInterval(refresh, 15000);
  document.body.dataset.ready = 'true';
}

start();
