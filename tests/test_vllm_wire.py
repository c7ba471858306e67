"""vLLM's wire format: the right number of the right token, or a refusal."""

import copy
import json

import numpy as np
import pytest
from vllm_fake import FakeServer, hashed_logits, log_softmax

from thundersync_jax.chat.base import StopTexts
from thundersync_jax.engines.vllm import wire
from thundersync_jax.engines.vllm.wire import WrongAnswer

PROMPT = np.arange(3, 9, dtype=np.int32)
STOPS = 17, 1


def asked(**changes):
    given = {"max_tokens": 4, "temperature": 0.7, "seed": 5, "stop_ids": STOPS}
    return wire.completion_request("m", PROMPT, **{**given, **changes})


def answered(ids=None, **changes):
    """What a server says, of these ids."""
    server = FakeServer()
    server.script = None if ids is None else lambda prompt: ids
    return server.answer(asked(**changes))


def read(answer, max_tokens=4, vocab_size=264):
    return wire.read_completion(answer, PROMPT, max_tokens, STOPS, vocab_size)


def test_stored_logprob_is_that_of_the_sampled_token():
    """The first entry of the returned table was stored (NVIDIA-NeMo/RL#3297)."""
    answer = answered([9], max_tokens=1)
    (choice,) = answer["choices"]
    choice["logprobs"]["top_logprobs"] = [{"token_id:7": -0.1, "token_id:9": -2.3}]
    found = read(answer, max_tokens=1)
    assert found.ids.tolist() == [9]
    np.testing.assert_allclose(found.logprobs, [-2.3], rtol=1e-6)
    choice["logprobs"]["top_logprobs"] = [{"token_id:7": -0.1}]
    with pytest.raises(WrongAnswer, match="token_id:9"):
        read(answer, max_tokens=1)


def test_scores_are_those_of_the_prompts_own_tokens():
    positions = np.array([2, 5])
    body = wire.scoring_request("m", PROMPT, 3)
    scores, tables = wire.read_scores(FakeServer().answer(body), PROMPT, positions)
    for score, table, position in zip(scores, tables, positions, strict=True):
        logprobs = log_softmax(hashed_logits(PROMPT[:position].tolist()))
        np.testing.assert_allclose(score, logprobs[PROMPT[position]], rtol=1e-6)
        best = wire.best_ids(table, 3, 264)
        assert [i for i, _ in best] == np.argsort(-logprobs)[:3].tolist()
        np.testing.assert_allclose([x for _, x in best], np.sort(logprobs)[:-4:-1])


def test_likeliest_ids_are_never_the_one_that_stands_there_by_chance():
    """Its entry comes first in the table, whatever its rank."""
    table = {
        "200": {"logprob": -9.0, "rank": 40},
        "7": {"logprob": -2.0, "rank": 2},
        "5": {"logprob": -1.0, "rank": 1},
        "6": {"logprob": -2.0, "rank": 3},
    }
    assert wire.best_ids(table, 3, 264) == [(5, -1.0), (6, -2.0), (7, -2.0)]
    with pytest.raises(WrongAnswer, match="expected 3 below 7: others are padding"):
        wire.best_ids(table, 3, 7)
    with pytest.raises(WrongAnswer, match="expected 4 below 264"):
        wire.best_ids(table, 4, 264)
    table["5"]["logprob"] = -9999.0  # as JSON writes -inf
    assert wire.best_ids(table, 3, 264)[-1] == (5, -np.inf)


def test_a_request_names_the_whole_distribution():
    """A folder's generation_config.json would cut it, and change the stop ids."""
    for body in (asked(), wire.scoring_request("m", PROMPT, 0)):
        assert body["top_p"] == 1 and body["top_k"] == 0 and body["min_p"] == 0
        assert body["repetition_penalty"] == 1 and body["ignore_eos"] is True
        assert body["presence_penalty"] == body["frequency_penalty"] == 0
        assert json.loads(json.dumps(body)) == body


@pytest.mark.parametrize(
    "ids, stopped",
    [([5, 6, 17], True), ([1], True), ([5, 6, 7, 8], False), ([5, 6, 7, 1], True)],
)
def test_what_ended_a_turn_is_seen_in_its_ids(ids, stopped):
    found = read(answered(ids))
    assert (found.ids.tolist(), found.stopped) == (ids, stopped)


def test_a_stop_text_ends_a_turn_and_what_came_behind_it_is_left_out():
    stops = StopTexts(("<6><7>",), lambda ids: "".join(f"<{i}>" for i in ids))
    body = asked(stop_texts=stops)
    assert body["stop"] == ["<6><7>"] and body["skip_special_tokens"] is False
    assert "stop" not in asked()
    for ids, kept, stopped in (
        ([5, 6, 7], 3, True),
        ([5, 6, 7, 8], 3, True),
        ([6, 7, 17], 2, True),
        ([5, 6, 8, 7], 4, False),
        ([5, 17], 2, True),
    ):
        answer = answered(ids)
        found = wire.read_completion(answer, PROMPT, 4, STOPS, 264, stops)
        assert (found.ids.tolist(), found.stopped) == (ids[:kept], stopped)
        assert len(found.logprobs) == kept
    with pytest.raises(WrongAnswer, match="without a stop id or text"):
        wire.read_completion(answered([5, 6]), PROMPT, 4, STOPS, 264, stops)


def choice_of(name, value):
    def change(answer):
        answer["choices"][0][name] = value

    return change


def table_of(number):
    def change(answer):
        table = answer["choices"][0]["logprobs"]["top_logprobs"][1]
        table["token_id:6"] = number

    return change


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda answer: answer.clear(), "no 'choices'"),
        (lambda answer: answer["choices"].clear(), "0 choices"),
        (lambda answer: answer["choices"].append({}), "2 choices"),
        (lambda answer: answer.update(choices=["text"]), "prompt_token_ids"),
        (choice_of("prompt_token_ids", [3, 4]), "prompt of 2 tokens.*the 6 that"),
        (choice_of("prompt_token_ids", [257, *range(3, 8)]), "the 6 that were sent"),
        (choice_of("token_ids", None), "token_ids"),
        (choice_of("token_ids", []), "0 tokens, expected 1 to 4"),
        (choice_of("token_ids", [5, 6, 264, 17]), "id 264.*below 264"),
        (choice_of("token_ids", [5, 6, -1, 17]), "id -1"),
        (choice_of("token_ids", [5, 6.5, 7, 17]), "list of integers"),
        (choice_of("token_ids", [5, 6, 7]), "3 of 4 tokens, ended by 'stop'"),
        (choice_of("token_ids", [5, 17, 7, 17]), "number 1 is the stop id 17"),
        (choice_of("token_ids", [5, 6, 7, 8, 17]), "5 tokens, expected 1 to 4"),
        (choice_of("logprobs", None), "no 'logprobs'"),
        (choice_of("logprobs", {"top_logprobs": [{}]}), "1 log-prob.* of 4 tokens"),
        (table_of(float("nan")), "nan, expected a finite"),
        (table_of(-9999.0), "-9999.0, expected a finite"),
        (table_of(None), "token_id:6"),
        (table_of("-1"), "expected a finite number"),
    ],
)
def test_a_wrong_answer_is_refused_with_what_is_wrong(change, expected):
    answer = copy.deepcopy(answered([5, 6, 7, 17]))
    read(answer)
    change(answer)
    with pytest.raises(WrongAnswer, match=expected):
        read(answer)


@pytest.mark.parametrize(
    "tables, expected",
    [
        (None, "prompt_logprobs"),
        ([None] * 5, "5 scores of 6 tokens"),
        ([None] * 6, "no '4'"),
        ([None, {"7": {"logprob": -1.0}}] + [None] * 4, "no '4'"),
        ([None, {"4": {"rank": 1}}] + [None] * 4, "logprob"),
    ],
)
def test_a_missing_score_is_an_error_and_never_another_number(tables, expected):
    answer = answered([5, 6, 7, 8])
    answer["choices"][0]["prompt_logprobs"] = tables
    with pytest.raises(WrongAnswer, match=expected):
        wire.read_scores(answer, PROMPT, np.array([1]))


def test_seeds_are_stable_and_differ_in_every_word():
    """Members of a group shared one seed elsewhere."""
    words = 3, 0, 1, 0, 2, 0
    seeds = {wire.seed_number(words)}
    for place in range(len(words)):
        changed = list(words)
        changed[place] += 1
        seeds.add(wire.seed_number(changed))
    seeds.add(wire.seed_number((*words, 0)))
    assert len(seeds) == len(words) + 2
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert wire.seed_number((0, 12)) != wire.seed_number((0, 1, 2))
    assert wire.seed_number(words) == 7910142581367569544


def test_statuses_say_whether_another_try_makes_sense():
    assert wire.read_json(200, '{"a": 1}') == {"a": 1}
    assert wire.read_json(200, "") is None
    with pytest.raises(WrongAnswer, match="no JSON but '<html>"):
        wire.read_json(200, "<html>")
    for status in (500, 503, 429):
        with pytest.raises(ConnectionError, match=f"{status}: it is busy"):
            wire.read_json(status, '{"error": {"message": "it is\\nbusy"}}')
    with pytest.raises(wire.RefusedRequest, match="404: Not Found"):
        wire.read_json(404, '{"detail":"Not Found"}')
