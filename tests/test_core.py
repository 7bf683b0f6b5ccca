"""The three checks that guard everything: sampler = learner, micro-batches change nothing, greedy = model.generate.

Then the draws, model.generate as a sampler, questions without a figure, 4-bit, advantages.
"""

import copy
import dataclasses
import inspect
import types
import weakref

import bitsandbytes as bnb
import pytest
import torch
from batches import (adapter_gradient, changed_inputs, chi_square_p, columns, dlogp, gradient, grouped,
                     learned_logprobs, moved_away, naive_logprobs, numbers, plain_inputs, prompts_of, questions,
                     relative, set_advantages, two_turns, uneven_rows)
from conftest import FAMILIES
from transformers.cache_utils import DynamicLayer

import grpo
from support import kv_cache
from support.models import image_ids
from support.order import Order, uniform_numbers
from support.padding import micro_batches

SHORT = dataclasses.replace(grpo.GEOQA, prompt=lambda question, with_solution=False: "短")  # room for many rows


# 1. Sampler = learner


@pytest.mark.parametrize("family, temperature, check_every", [  # 1 and 16: a CPU's and a GPU's way to drop rows
    ("qwen3_5", 1.0, 16), ("qwen3_5", 0.7, 1),
    *((family, *how) for family in FAMILIES for how in ((1.0, 1), (0.7, 16)))])
def test_sampler_equals_learner(shared, monkeypatch, family, temperature, check_every):
    monkeypatch.setitem(grpo.CHECK_EVERY, "cpu", check_every)
    policy = shared(family)
    prompts = prompts_of(policy, questions())
    assert len({len(prompt.ids) for prompt in prompts}) == 3
    assert len({len(prompt.figure.pooler_output[0]) for prompt in prompts}) == 2
    rows = uneven_rows(policy, prompts, temperature=temperature)
    for row, (logprobs, entropies) in learned_logprobs(policy, rows, temperature).items():
        assert (logprobs - row.logprobs).abs().max() <= 1e-4 and (entropies - row.entropies).abs().max() <= 1e-4
        stops = torch.isin(row.tokens, policy.stop_ids)
        assert not stops[:-1].any() and stops[-1] == row.finished and row.trained.all()


@pytest.mark.parametrize("family", FAMILIES)
def test_sampler_equals_learner_over_two_turns(shared, family):
    """A tool's tokens are read, and not trained; what follows was drawn from the longer prompt."""
    policy = shared(family)
    rows = two_turns(policy, prompts_of(policy, questions()), temperature=0.7)
    assert all(0 < row.length < len(row.tokens) for row in rows)
    assert dlogp(policy, rows, temperature=0.7) <= 1e-4


def test_sampler_equals_learner_after_an_update(load):
    policy = load()
    prompts = prompts_of(policy, questions())
    rows = set_advantages(uneven_rows(policy, prompts, max_tokens=21))
    before = dlogp(policy, rows)
    metrics = grpo.update(policy, torch.optim.AdamW(policy.parameters(), lr=1e-2), rows, grpo.Config())
    assert metrics["trainer/dlogp_max"] <= 1e-4 and before <= 1e-4
    assert dlogp(policy, rows) > 1e-2, "the update changed nothing"
    assert dlogp(policy, grpo.sample(policy, grouped(prompts, 4), 21)) <= 1e-4


def test_behind_a_rows_end_the_learner_says_nothing(shared):
    policy = shared(layers=2)
    rows = uneven_rows(policy, prompts_of(policy, questions()[:1]) * 3, max_tokens=21)
    lengths = [len(row.tokens) for row in rows]
    for logprobs in grpo.completion_logprobs(policy, rows, 1.0, with_entropies=True):
        assert logprobs.shape == (12, max(lengths))
        assert all((each[n:] == 0).all() and (each[:n] != 0).all() for each, n in zip(logprobs, lengths))


@pytest.mark.parametrize("check_every", [1, 16])
def test_dropped_rows_do_not_disturb_the_others(shared, monkeypatch, check_every):
    monkeypatch.setitem(grpo.CHECK_EVERY, "cpu", check_every)
    policy = shared()
    policy.stop_ids = torch.tensor([-1])
    prompts = prompts_of(policy, questions())
    full = grpo.sample(policy, prompts, 24, temperature=0)
    policy.stop_ids = full[0].tokens[12:13]
    decoded = []
    with changed_inputs(policy.base, lambda inputs: decoded.append(len(inputs["input_ids"]))):
        stopped = grpo.sample(policy, prompts, 24, temperature=0)
    assert len(stopped[0].tokens) <= 13 and stopped[0].finished
    assert decoded[1] == 3 > decoded[-1] or len(decoded) < 24, "no row was dropped"
    for row, endless in zip(stopped, full):
        assert torch.equal(row.tokens, endless.tokens[:len(row.tokens)])


@pytest.mark.parametrize("sampler", grpo.SAMPLERS)
def test_a_forbidden_pad_token_leaves_no_trace(shared, monkeypatch, sampler):
    """What stands behind a row's end until the row is dropped may have a log-probability of -inf."""
    monkeypatch.setitem(grpo.CHECK_EVERY, "cpu", 16)
    policy = shared(layers=2)
    policy.forbidden_ids = torch.cat([policy.forbidden_ids, torch.tensor([policy.tokenizer.pad_token_id])])
    uneven_rows(policy, prompts := prompts_of(policy, questions()), max_tokens=21)  # leaves tokens to stop at
    rows = grpo.SAMPLERS[sampler](policy, grouped(prompts, 4), 20)
    assert len({len(row.tokens) for row in rows}) > 1
    assert all(row.logprobs.isfinite().all() and row.entropies.isfinite().all() for row in rows)


def greedily(policy, asked, max_tokens, at_once=0):
    """The answers to `asked`, two for each question, `at_once` rows at a time."""
    config = grpo.Config(group_size=2, max_tokens=max_tokens, temperature=0, rollouts_at_once=at_once)
    return grpo.answer(policy, [((0, 0, place), question) for place, question in enumerate(asked)], config, grpo.GEOQA)


@pytest.mark.parametrize("family", FAMILIES)
def test_waves_and_prefill_in_chunks_change_no_token(shared, monkeypatch, family):
    """The naive twin: all rows at once, one prefill, a cache that is copied for each token."""
    policy = shared(family)
    policy.stop_ids = torch.tensor([-1])
    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "GrowingLayer", plain_layer)
        whole = greedily(policy, questions(), 16)
    policy.stop_ids = whole[0].tokens[7:8]
    width = max(len(row.prompt.ids) for row in whole)
    monkeypatch.setattr(grpo, "PREFILL_TOKENS", 2 * width)  # two prompts, then one
    monkeypatch.setattr(kv_cache, "BLOCK", 5)
    for at_once in (0, 3, 1):  # 3: a group is cut in two
        rows = greedily(policy, questions(), 16, at_once)
        assert min(len(row.tokens) for row in rows) <= 8, "no row was dropped"
        assert all(torch.equal(row.tokens, all_.tokens[:len(row.tokens)]) for row, all_ in zip(rows, whole))
        assert dlogp(policy, rows) <= 1e-4


def prefilled(sizes):
    """A change of inputs that changes nothing and notes how many prompts go through the model at once."""
    return lambda inputs: sizes.append(len(inputs["input_ids"])) if inputs["input_ids"].shape[1] > 1 else None


def test_prefill_takes_each_prompt_once_and_as_many_as_it_may(shared, monkeypatch):
    policy, sizes = shared(), []
    prompts = prompts_of(policy, questions())
    width = max(len(prompt.ids) for prompt in prompts)
    with changed_inputs(policy.base, prefilled(sizes)):
        for tokens in (2 * width, 1):
            monkeypatch.setattr(grpo, "PREFILL_TOKENS", tokens)
            grpo.sample(policy, grouped(prompts, 4), 2)
    assert sizes == [2, 1] + [1, 1, 1]


def test_a_wave_leaves_nothing_beside_the_next(shared):
    policy, caches = shared(), []

    def watch(inputs):
        if inputs["input_ids"].shape[1] > 1:
            assert not any(cache() is not None for cache in caches), "the last wave's cache is still there"
            caches.append(weakref.ref(inputs["cache"]))

    with changed_inputs(policy.base, watch):
        greedily(policy, questions(), 8, at_once=2)
    assert len(caches) == 3


def plain_layer(keys, values):
    layer = DynamicLayer()
    layer.update(keys, values)
    return layer


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("key_heads, heads", [(2, 2), (1, 4)])
def test_one_token_of_a_recurrent_layer_is_the_librarys(dtype, tolerance, key_heads, heads):
    import transformers.models.qwen3_5.modeling_qwen3_5 as qwen

    torch.manual_seed(0)
    rule, convolution = (inspect.unwrap(getattr(qwen, name)) for name in (
        "torch_recurrent_gated_delta_rule", "causal_conv1d_update"))
    expected_state = torch.randn(3, heads, 8, 16)
    state, inputs, weight = expected_state.clone(), torch.randn(3, 12, 4, dtype=dtype), torch.randn(12, 4, dtype=dtype)
    with torch.no_grad():
        for _ in range(5):
            query, key = torch.randn(2, 3, 1, key_heads, 8, dtype=dtype)
            value, beta = torch.randn(3, 1, heads, 16, dtype=dtype), torch.rand(3, 1, heads, dtype=dtype)
            options = dict(g=-torch.rand(3, 1, heads), beta=beta, output_final_state=True, use_qk_l2norm_in_kernel=True)
            expected, expected_state = rule(query, key, value, initial_state=expected_state, **options)
            found, same = kv_cache.one_token_delta_rule(rule)(query, key, value, initial_state=state, **options)
            assert same is state and found.dtype == expected.dtype and found.shape == expected.shape
            assert torch.allclose(found, expected, atol=tolerance, rtol=tolerance)
            assert torch.allclose(state, expected_state, atol=1e-5)

            token, copy_of_inputs = torch.randn(3, 12, 1, dtype=dtype), inputs.clone()
            expected = convolution(token, copy_of_inputs, weight, None, "silu")
            found = kv_cache.one_token_convolution(convolution)(token, inputs, weight, None, "silu")
            assert torch.allclose(found, expected, atol=tolerance, rtol=tolerance) and found.dtype == dtype
            assert torch.equal(inputs, copy_of_inputs)


def test_gradients_and_several_tokens_go_to_the_librarys_rule():
    calls = []
    rule = kv_cache.one_token_delta_rule(lambda *args, **options: calls.append(options["initial_state"]))
    one, two, state = torch.zeros(1, 1, 1, 2), torch.zeros(1, 2, 1, 2), torch.zeros(1, 1, 2, 2)
    gate = torch.zeros(1, 1, 1)
    rule(one, one, one, gate, gate, initial_state=state)  # with gradients
    with torch.no_grad():
        rule(one, one, one, gate, gate)
        rule(two, two, two, gate, gate, initial_state=state)
        assert len(calls) == 3
        assert rule(one, one, one, gate, gate, initial_state=state)[1] is state and len(calls) == 3


def test_growing_cache_holds_what_a_plain_one_holds(monkeypatch):
    monkeypatch.setattr(kv_cache, "BLOCK", 4)
    torch.manual_seed(0)
    states = torch.randn(2, 3, 2, 5, 8)
    plain, growing = plain_layer(*states), kv_cache.GrowingLayer(*states)
    allocations = set()
    for t in range(20):
        if t in (3, 9):
            index = torch.tensor([2, 0, 0, 1])[:4 - t // 9]
            plain.reorder_cache(index), growing.reorder_cache(index)
        rows = plain.keys.shape[0]
        new = torch.randn(2, rows, 2, 1 + t % 3, 8)
        expected, found = plain.update(*new), growing.update(*new)
        assert all(torch.equal(a, b) for a, b in zip(expected, found))
        assert growing.get_seq_length() == plain.get_seq_length()
        allocations.add(growing.keys.data_ptr())
    assert len(allocations) < 16, "copied for each token"


def test_swapping_two_figures_changes_logprobs(shared):
    policy = shared()
    batch = questions(sizes=((70, 64),) * 3)
    images = [batch[1].image, batch[0].image, batch[2].image]
    swapped = prompts_of(policy, [dataclasses.replace(q, image=image) for q, image in zip(batch, images)])
    rows = grpo.sample(policy, grouped(prompts_of(policy, batch), 2), 12)
    others = [dataclasses.replace(row, prompt=prompt) for row, prompt in zip(rows, grouped(swapped, 2))]
    right, wrong = (learned_logprobs(policy, each) for each in (rows, others))
    changed = torch.tensor([(right[row][0] - wrong[other][0]).abs().max() for row, other in zip(rows, others)])
    assert (changed[:4] > 1e-3).all() and (changed[4:] < 1e-4).all(), changed


@pytest.mark.parametrize("sampler", grpo.SAMPLERS)
def test_image_tokens_are_never_drawn(load, sampler):
    policy = load(layers=4)
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    ids = policy.tokenizer.convert_tokens_to_ids(names)
    head = policy.base.get_output_embeddings()
    # A head that strongly wants them: its rows for these tokens get the direction of the final states.
    states = []
    hook = head.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0][:, -1].detach()))
    prompts = prompts_of(policy, questions())
    grpo.sample(policy, prompts, 1)
    hook.remove()
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    head.weight[ids] = 100 * states[0].mean(0) / states[0].norm()
    with torch.no_grad():
        logits = head(states[0])
    assert set(logits.argmax(-1).tolist()) <= set(ids), "the head does not want image tokens: the test shows nothing"
    rows = grpo.SAMPLERS[sampler](policy, grouped(prompts, 4), 20)
    assert not torch.isin(columns(rows), torch.tensor(ids)).any()
    assert dlogp(policy, rows) <= 1e-4


# 2. Gradients


def naive_gradient(policy, rows, temperature):
    """float64, one row at a time, no padding, no chunks, no cached figures, whole logits: the formula and no more.

    d/dtheta of  1/N sum_i sum_t -exp(logp_it - old_it) A_it,  N the number of completion tokens of all rows.
    """
    double = copy.deepcopy(policy.model).double().eval()
    loss = 0.0
    for row in rows:
        logp = naive_logprobs(policy, row, temperature, double.get_base_model())
        loss = loss - ((logp - row.logprobs.double()).exp() * row.advantage.double()).sum()
    (loss / sum(len(row.tokens) for row in rows)).backward()
    return torch.cat([p.grad.flatten() for p in double.parameters() if p.requires_grad])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_is_the_closed_form_for_any_micro_batches(shared, temperature):
    policy = shared(layers=2)
    rows = uneven_rows(policy, prompts_of(policy, questions()), temperature=temperature)
    set_advantages(moved_away(rows, 0.3))
    budgets = 1, 300, 10**6
    cuts = [micro_batches(rows, budget) for budget in budgets]
    assert len(cuts[0]) == 12 and len(cuts[2]) < len(cuts[1]) < 12 and len(cuts[2]) == 3
    one, some, whole = (gradient(policy, rows, budget, temperature=temperature) for budget in budgets)
    assert relative(one, whole) <= 1e-5 and relative(some, whole) <= 1e-5
    assert relative(whole, naive_gradient(policy, rows, temperature)) <= 1e-5


@pytest.mark.parametrize("budget", [1, 300, 1000, 10**6])
def test_micro_batches_keep_to_their_budget(budget):
    """The prompt counts once, a completion as long as the longest of its micro-batch."""
    generator = torch.Generator().manual_seed(0)
    widths, lengths = (torch.randint(1, 200, (count,), generator=generator).tolist() for count in (6, 24))
    prompts = [types.SimpleNamespace(ids=range(width)) for width in widths]
    rows = [types.SimpleNamespace(prompt=prompts[i // 4], tokens=range(length)) for i, length in enumerate(lengths)
            if i % 5]
    cut = micro_batches(rows, budget)
    assert sorted(map(id, rows)) == sorted(id(row) for micro in cut for row in micro)
    sizes = [len(micro[0].prompt.ids) + len(micro) * max(len(row.tokens) for row in micro) for micro in cut]
    for micro, size in zip(cut, sizes):
        assert len({id(row.prompt) for row in micro}) == 1 and (size <= budget or len(micro) == 1)
    for micro, following in zip(cut, cut[1:]):  # as many as fit
        if micro[0].prompt is following[0].prompt:
            assert len(micro[0].prompt.ids) + (len(micro) + 1) * len(following[0].tokens) > budget


def test_checkpointing_and_logit_chunks_change_nothing(shared, monkeypatch):
    gradients, rows = [], None
    for chunk, checkpointing in ((10**6, "off"), (7, "on")):
        monkeypatch.setattr(grpo, "LOGIT_CHUNK", chunk)
        policy = shared(layers=2, activation_checkpointing=checkpointing)
        assert policy.base.is_activation_checkpointing == (checkpointing == "on")
        rows = rows or set_advantages(uneven_rows(policy, prompts_of(policy, questions())))
        gradients.append(gradient(policy, rows))
    assert relative(*gradients) <= 1e-5


def test_gradient_reaches_the_adapter_only(shared):
    policy = shared(layers=2)
    rows = set_advantages(grpo.sample(policy, grouped(prompts_of(policy, questions()), 2), 8))
    grpo.accumulate_gradients(policy, micro_batches(rows, 1000), grpo.Config())
    for name, weight in policy.model.named_parameters():
        assert (weight.grad is not None and weight.grad.abs().sum() > 0) == ("lora_" in name), name


# 3. Greedy decoding = model.generate


def generated(policy, prompts, max_tokens):
    """What transformers' own greedy decoding gives for each prompt alone, without stopping."""
    return [policy.base.generate(
        **plain_inputs(policy, prompt), do_sample=False, temperature=None, top_p=None, top_k=None,
        max_new_tokens=max_tokens, suppress_tokens=policy.forbidden_ids.tolist(), eos_token_id=-1,
        pad_token_id=policy.tokenizer.pad_token_id)[0, len(prompt.ids):] for prompt in prompts]


def check_greedy(rows, reference):
    for i, row in enumerate(rows):
        assert torch.equal(row.tokens, reference[i // 2][:len(row.tokens)]), f"row {i}"


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(shared, family):
    policy = shared(family)
    for seed in (0, 1):  # twice in a row, with other figures: no state may stay behind
        prompts = prompts_of(policy, questions(seed))
        reference = generated(policy, prompts, 18)
        assert all(len(set(row.tolist())) >= 5 for row in reference), "the answers do not vary"
        policy.stop_ids = reference[0][9:10] if seed else torch.tensor([-1])
        rows = grpo.sample(policy, grouped(prompts, 2), 18, temperature=0)
        check_greedy(rows, reference)
        for i, row in enumerate(rows):
            drawn = torch.isin(reference[i // 2], policy.stop_ids)
            assert len(row.tokens) == (int(drawn.int().argmax()) + 1 if drawn.any() else 18)
    assert rows[0].finished and len(rows[0].tokens) <= 10


def mutants(prompts):
    """name -> (whether it is of decoding, what it does to positions and mask of two rows a prompt, or of prefill)."""
    lengths = torch.tensor([len(prompt.ids) for prompt in prompts])
    delta = torch.tensor([prompt.next_position for prompt in prompts]) - lengths
    padding = lengths.max() - lengths
    assert delta.any() and padding.any()
    plain = (torch.arange(lengths.max()) - padding[:, None]).clamp(min=0).expand(3, -1, -1)
    delta, padding = (x.repeat_interleave(2)[None, :, None] for x in (delta, padding))
    return {"no change": (True, lambda p, m: (p, m)),
            "no rope delta": (True, lambda p, m: (p - delta, m)),
            "positions off by one": (True, lambda p, m: (p + 1, m)),
            "padding counted": (True, lambda p, m: (p + padding, m)),
            "padding visible": (True, lambda p, m: (p, torch.ones_like(m))),
            "a prompt's padding visible": (False, lambda p, m: (p, torch.ones_like(m))),
            "a prompt's figure at positions of text": (False, lambda p, m: (plain, m))}


def test_greedy_comparison_sees_mutants(shared):
    policy = shared()
    policy.stop_ids = torch.tensor([-1])  # no row is dropped, so rows stay in the order that the mutants assume
    prompts = prompts_of(policy, questions())
    reference = generated(policy, prompts, 12)
    for name, (decoding, mutate) in mutants(prompts).items():
        mutated = []

        def change(inputs):
            if (inputs["input_ids"].shape[1] == 1) == decoding:
                mutated.append(name)
                changed = mutate(inputs["position_ids"], inputs["attention_mask"])
                inputs["position_ids"], inputs["attention_mask"] = changed

        with changed_inputs(policy.base, change):
            rows = grpo.sample(policy, grouped(prompts, 2), 12, temperature=0)
        assert len(mutated) == (11 if decoding else 1)
        if name == "no change":
            check_greedy(rows, reference)
        else:
            with pytest.raises(AssertionError, match="row"):
                check_greedy(rows, reference)


# model.generate as a sampler


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_is_the_loops_twin(shared, family):
    policy = shared(family)
    prompts = grouped(prompts_of(policy, questions()), 2)
    policy.stop_ids = torch.tensor([-1])
    policy.stop_ids = grpo.sample(policy, prompts, 12, temperature=0)[0].tokens[9:10]
    loop, twin = (grpo.SAMPLERS[name](policy, prompts, 25, temperature=0) for name in ("loop", "generate"))
    assert loop[0].finished and len({len(row.tokens) for row in loop}) > 1
    for row, other in zip(loop, twin, strict=True):
        assert torch.equal(row.tokens, other.tokens) and row.finished == other.finished and other.trained.all()
        assert row.prompt is other.prompt
        for name in ("logprobs", "entropies"):
            assert (getattr(row, name) - getattr(other, name)).abs().max() <= 1e-4, name


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_generate_says_what_the_loop_says_of_its_draws(shared, temperature):
    """The loop's words on generate's draws: greedy choices would hide a wrong temperature."""
    policy = shared(layers=2)
    rows = grpo.generate(policy, grouped(prompts_of(policy, questions()), 2), 12, temperature)
    for row, (logprobs, entropies) in learned_logprobs(policy, rows, temperature).items():
        assert (logprobs - row.logprobs).abs().max() <= 1e-4 and (entropies - row.entropies).abs().max() <= 1e-4
    assert len({tuple(row.tokens.tolist()) for row in rows}) == 6, "the rows of a group are equal"


# Draws


@pytest.mark.parametrize("sampler, family, temperature, count", [
    ("loop", "qwen3_5", 1.0, 4000), ("loop", "qwen3_5", 0.7, 4000), ("generate", "qwen3_vl", 0.7, 1500)])
def test_frequencies_match_the_softmax(shared, sampler, family, temperature, count):
    """The folder's generation_config says top_k 20 and top_p 0.95: neither may cut anything off."""
    policy = shared(family, layers=2)
    assert policy.base.generation_config.top_k == 20 and policy.base.generation_config.top_p == 0.95
    policy.stop_ids = torch.tensor([-1])
    (prompt,) = prompts_of(policy, questions()[:1], SHORT)
    torch.manual_seed(0)
    pairs = columns(grpo.SAMPLERS[sampler](policy, [prompt] * count, 2, temperature))

    def probabilities(*continuation):
        inputs = plain_inputs(policy, prompt)
        inputs["input_ids"] = torch.cat([prompt.ids, torch.tensor(continuation, dtype=torch.long)])[None]
        inputs["mm_token_type_ids"] = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(continuation)))
        with torch.no_grad():
            logits = policy.base(**inputs).logits[0, -1]
        logits[policy.forbidden_ids] = -torch.inf
        return (logits / temperature).softmax(-1)

    vocabulary = len(probabilities())
    first = pairs[:, 0].bincount(minlength=vocabulary)
    assert (first > 0).sum() > 25, "too few different tokens to see a top-k of 20"
    assert chi_square_p(first, probabilities()) > 1e-3
    for token in first.argsort(descending=True)[:2].tolist():
        second = pairs[pairs[:, 0] == token, 1].bincount(minlength=vocabulary)
        assert chi_square_p(second, probabilities(token)) > 1e-3


@pytest.mark.parametrize("sampler", grpo.SAMPLERS)
def test_nucleus_draws_from_it_but_reports_the_full_softmax(shared, sampler):
    policy, draw = shared("qwen3_vl"), grpo.SAMPLERS[sampler]
    prompts = prompts_of(policy, questions()[:1], SHORT) * 400
    torch.manual_seed(0)
    rows, full = draw(policy, prompts, 1, top_p=0.5), draw(policy, prompts, 1)
    mass = {int(row.tokens): float(row.logprobs.exp()) for row in rows}
    assert set(mass) < {int(row.tokens) for row in full}
    assert dlogp(policy, rows[:20]) <= 1e-4
    assert sum(mass.values()) - min(mass.values()) < 0.5 <= sum(mass.values())


def test_frequencies_at_the_real_vocabulary():
    """In cells of tokens that lie together, and in cells of tokens that lie far apart."""
    logits = 3 * torch.randn(1, 248_320, generator=torch.Generator().manual_seed(0))
    forbidden = torch.tensor([0, 7, 151_655, 248_319])
    logprobs = grpo.allowed_logprobs(logits, forbidden, 0.7)
    drawn = torch.cat([grpo.draw(logprobs.expand(len(part), -1), 0.7, 1.0, part) for part in numbers(600).split(50)])
    assert not torch.isin(drawn, forbidden).any()
    probabilities = (logits[0].double() / 0.7).index_fill(0, forbidden, -torch.inf).softmax(0)
    for cell in (torch.arange(248_320) // 8000, torch.arange(248_320) % 31):
        expected = torch.zeros(int(cell.max()) + 1, dtype=torch.double).index_add(0, cell, probabilities)
        assert chi_square_p(cell[drawn].bincount(minlength=len(expected)), expected) > 1e-3


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("vocabulary", [20, 248_320])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(vocabulary, top_p):
    """First, last and most tokens have probability 0, and the sum of the others is rounded."""
    logits = 5 * torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[:, [0, 1, vocabulary // 2, -2, -1]] = -torch.inf
    logits[4:, vocabulary // 5:] = -torch.inf
    logits[0, 3] = 200.0  # the others' probabilities are 0 in float32
    logprobs = logits.log_softmax(-1)
    for uniform in (0.0, 1e-45, 1 - 2**-24):
        drawn = grpo.draw(logprobs, 1.0, top_p, torch.full((6,), uniform))
        assert ((drawn >= 0) & (drawn < vocabulary)).all()
        assert (logprobs.gather(1, drawn[:, None]).exp() > 0).all()


def test_a_draw_is_the_inverse_of_the_cumulative_probabilities():
    logprobs = torch.tensor([0.0, 0.25, 0.5, 0.0, 0.25]).log().expand(7, -1)
    uniforms = torch.tensor([0.0, 0.2, 0.25, 0.5, 0.74, 0.75, 0.99])
    assert grpo.draw(logprobs, 1.0, 1.0, uniforms).tolist() == [1, 1, 2, 2, 2, 4, 4]
    assert grpo.draw(logprobs, 1.0, 0.5, uniforms).tolist() == [2] * 7
    assert grpo.draw(logprobs, 0.0, 1.0, uniforms).tolist() == [2] * 7


def test_uniform_numbers_depend_on_their_key_alone():
    keys = [(42, step, place) for step in range(1, 4) for place in range(5)]
    whole = uniform_numbers(keys, 4, 30)
    assert whole.shape == (60, 30) and whole.dtype == torch.float32 and (whole >= 0).all() and (whole < 1).all()
    assert len({tuple(row.tolist()) for row in whole}) == 60
    assert not torch.equal(whole, uniform_numbers([(43, *key[1:]) for key in keys], 4, 30))
    for i in (0, 7, 14):
        assert torch.equal(uniform_numbers([keys[i]], 2, 11), whole[4 * i:4 * i + 2, :11])
    assert chi_square_p((whole * 20).long().flatten().bincount(), torch.full((20,), 0.05)) > 1e-3


def drawn_in_a_step(policy, place=0, **flags):
    """The rows of a whole step from `place` on in the order of the questions; rewards are equal, nothing is learned."""
    order = Order(questions() + questions(seed=1, subjects=("短", "求x", "求角")), seed=5, place=place, step=3)
    config = grpo.Config(**{"batch_size": 4, "group_size": 3, "max_tokens": 10} | flags)
    task = dataclasses.replace(grpo.GEOQA, rewards={"right": lambda answer, question: 0})
    return grpo.train_step(policy, None, order, config, task)[1].rows


def same_tokens(rows, others):
    return [torch.equal(row.tokens, other.tokens) for row, other in zip(rows, others, strict=True)]


def test_draws_do_not_depend_on_waves_or_on_what_else_is_drawn(shared):
    policy = shared(layers=2)
    policy.stop_ids = torch.arange(0, 256, 16)
    whole = drawn_in_a_step(policy)
    assert len({len(row.tokens) for row in whole}) > 3 and len({tuple(row.tokens.tolist()) for row in whole}) == 12
    for at_once in (5, 1):
        assert all(same_tokens(drawn_in_a_step(policy, rollouts_at_once=at_once), whole)), at_once
    assert all(same_tokens(drawn_in_a_step(policy, place=2, batch_size=2), whole[6:]))  # resumed, a smaller batch
    fewer = drawn_in_a_step(policy, group_size=2, max_tokens=6)
    assert all(torch.equal(row.tokens, whole[i // 2 * 3 + i % 2].tokens[:6]) for i, row in enumerate(fewer))
    assert not all(same_tokens(drawn_in_a_step(policy, place=6), whole))  # the same questions in the next round


def test_the_order_of_groups_changes_no_draw(shared):
    policy, config = shared(layers=2), grpo.Config(group_size=2, max_tokens=12)
    asked = [((5, 1, place), question) for place, question in enumerate(questions())]
    there, back = (grpo.answer(policy, draws, config, grpo.GEOQA) for draws in (asked, asked[::-1]))
    assert all(same_tokens(there, back[4:] + back[2:4] + back[:2]))


# Questions without a figure


@pytest.mark.parametrize("family", FAMILIES)
def test_questions_without_a_figure(shared, family):
    """Mixed with others, in the same prefill: sampler = learner, greedy = model.generate, and they train."""
    policy = shared(family, layers=2)
    asked = questions(sizes=((70, 64), None, (130, 96)))
    prompts = prompts_of(policy, asked)
    assert prompts[1].figure is None and not torch.isin(prompts[1].ids, image_ids(policy.base)).any()
    assert prompts[1].next_position == len(prompts[1].ids)
    rows = set_advantages(uneven_rows(policy, prompts, max_tokens=21))
    assert dlogp(policy, rows) <= 1e-4
    policy.stop_ids = torch.tensor([-1])
    check_greedy(grpo.sample(policy, grouped(prompts, 2), 12, temperature=0), generated(policy, prompts, 12))
    ours = gradient(policy, rows[4:8])
    loss = sum(-((naive_logprobs(policy, row) - row.logprobs).exp() * row.advantage).sum() for row in rows[4:8])
    (loss / sum(row.length for row in rows[4:8])).backward()
    assert relative(ours, adapter_gradient(policy)) <= 1e-5


def test_a_batch_of_text_alone_trains(shared):
    policy = shared(layers=2)
    asked = questions(sizes=(None,) * 3)
    config = grpo.Config(batch_size=3, group_size=4, max_tokens=8)
    task = dataclasses.replace(grpo.GEOQA, rewards={"right": lambda answer, question: int(answer.tokens.sum()) % 2})
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    metrics, _ = grpo.train_step(policy, optimizer, Order(asked, 0), config, task)
    assert metrics["train_datums"] > 0 and metrics["trainer/dlogp_max"] <= 1e-4 and metrics["trainer/grad_norm"] > 0


# NF4


def nf4_policy(shared):
    policy = shared(layers=2, quantization="nf4")
    linear = [m for m in policy.base.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert linear and all(m.weight.quant_state is not None for m in linear)
    return policy


def test_nf4_sampler_equals_learner(shared):
    policy = nf4_policy(shared)
    assert dlogp(policy, uneven_rows(policy, prompts_of(policy, questions()))) <= 1e-4


def test_nf4_gradient_after_a_rollout_is_that_of_the_dequantised_model(shared, load):
    policy, plain = nf4_policy(shared), load(adapter=True)
    rows = set_advantages(uneven_rows(policy, prompts_of(policy, questions())))
    targets = dict(plain.model.named_modules())
    for name, module in policy.model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            targets[name].weight.data = weight.view_as(targets[name].weight).float()
    assert relative(gradient(policy, rows), gradient(plain, rows)) <= 1e-3


MIXERS = {"linear_attn": ("in_proj_qkv", "in_proj_z", "out_proj"),
          "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj")}


def linear_layers():
    """The names that must be in 4-bit and adapted: layer 0 is recurrent, 1 attention."""
    kinds = ["linear_attn", "self_attn"]
    return {f"model.language_model.layers.{i}.{part}.{name}" for i, kind in enumerate(kinds)
            for part, names in ((kind, MIXERS[kind]), ("mlp", ("gate_proj", "up_proj", "down_proj")))
            for name in names}


def test_nf4_and_lora_sit_on_exactly_the_right_modules(shared):
    policy = shared(layers=2, quantization="nf4")
    four_bit = {name.removesuffix(".base_layer") for name, module in policy.base.named_modules()
                if isinstance(module, bnb.nn.Linear4bit)}
    adapted = {name.removesuffix(".lora_A.default") for name, _ in policy.base.named_modules()
               if name.endswith(".lora_A.default")}
    assert four_bit == linear_layers()
    assert adapted == linear_layers()
    assert all(p.dtype == torch.float32 for p in policy.parameters())
    state = next(m for m in policy.base.modules() if isinstance(m, bnb.nn.Linear4bit)).weight.quant_state
    assert state.quant_type == "nf4" and state.nested
    config = policy.model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 4, 0.0)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl"])
def test_lora_of_the_other_families(shared, family):
    adapted = {name.removesuffix(".lora_A.default") for name, _ in shared(family).base.named_modules()
               if name.endswith(".lora_A.default")}
    assert adapted == {f"model.language_model.layers.{i}.{name}" for i in range(2) for name in (
        *(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down")))}


# Advantages


def test_group_advantages():
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1], [0.1] * 4])
    plain, normalised = grpo.group_advantages(rewards), grpo.group_advantages(rewards, "grpo_std")
    assert torch.allclose(plain[0], torch.tensor([0.75, -0.25, -0.25, -0.25]))
    assert torch.allclose(normalised[0], plain[0] / 0.5, atol=1e-6)
    assert (plain[1:] == 0).all() and (normalised[1:] == 0).all()
    seven = torch.full((1, 7), 0.1)  # the float32 mean of seven 0.1 is not 0.1
    assert (seven - seven.mean()).abs().max() > 0
    assert all((grpo.group_advantages(seven, rule) == 0).all() for rule in grpo.ADVANTAGES)


def test_an_advantage_of_ones_own(monkeypatch):
    monkeypatch.setitem(grpo.ADVANTAGES, "best", lambda rewards: (rewards == rewards.amax(1, keepdim=True)).float())
    rewards = torch.tensor([[1.0, 3, 3], [2, 2, 2]])
    assert grpo.group_advantages(rewards, "best").tolist() == [[0, 1, 1], [0, 0, 0]]
