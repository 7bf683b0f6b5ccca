"""The three checks that guard everything: sampler = learner, micro-batches change nothing, greedy = model.generate."""

import copy
import dataclasses
import inspect
import functools
import math
import types
import weakref

import bitsandbytes as bnb
import pytest
import torch
from batches import prompts_of, questions, uneven_rollouts
from conftest import FAMILIES
from transformers.cache_utils import DynamicLayer

import grpo
from support import kv_cache
import vision_tokens


@pytest.fixture
def load(load):
    """Policies of four layers here: what a cache or a mask does to one layer, the next of its kind must see."""
    return functools.partial(load, layers=4)


def all_rows(rollouts):
    return list(range(len(rollouts.tokens)))


def dlogp(policy, prompts, rollouts):
    """Largest difference between the sampler's and the learner's log-probabilities."""
    with torch.no_grad():
        logprobs = grpo.completion_logprobs(policy, prompts, rollouts, all_rows(rollouts))
    return (logprobs - rollouts.logprobs)[rollouts.mask].abs().max().item()


# 1. Sampler = learner


@pytest.mark.parametrize("family, temperature, check_every", [  # 1 and 16: a CPU's and a GPU's way to drop rows
    ("qwen3_5", 1.0, 16), ("qwen3_5", 0.7, 1),
    *((family, *how) for family in FAMILIES for how in ((1.0, 1), (0.7, 16)))])
def test_sampler_equals_learner(load, monkeypatch, family, temperature, check_every):
    monkeypatch.setattr(grpo, "finished_check_interval", lambda device: check_every)
    policy = load(family, adapter=True)
    prompts = prompts_of(policy, questions())
    assert len(set(prompts.attention_mask.sum(1).tolist())) == 3 and len(set(prompts.image_tokens)) == 2
    rollouts = uneven_rollouts(policy, prompts, temperature=temperature)
    assert dlogp(policy, prompts, rollouts) <= 1e-4
    beyond = ~rollouts.mask
    assert (rollouts.tokens[beyond] == policy.tokenizer.pad_token_id).all()
    assert (rollouts.logprobs[beyond] == 0).all() and (rollouts.entropies[beyond] == 0).all()


def test_sampler_equals_learner_after_an_update(load):
    policy = load(learning_rate=1e-2)
    prompts = prompts_of(policy, questions())
    rollouts = uneven_rollouts(policy, prompts)
    before = dlogp(policy, prompts, rollouts)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    advantages = torch.randn(rollouts.tokens.shape, generator=torch.Generator().manual_seed(0))
    metrics = grpo.update(policy, optimizer, prompts, rollouts, advantages, torch.arange(12), grpo.Config())
    assert metrics["trainer/dlogp_max"] <= 1e-4 and before <= 1e-4
    assert dlogp(policy, prompts, rollouts) > 1e-2, "the update changed nothing"
    rollouts = grpo.sample(policy, prompts, 4, 40)
    assert dlogp(policy, prompts, rollouts) <= 1e-4


@pytest.mark.parametrize("check_every", [1, 16])
def test_dropped_rows_do_not_disturb_the_others(load, monkeypatch, check_every):
    monkeypatch.setattr(grpo, "finished_check_interval", lambda device: check_every)
    policy = load(adapter=True)
    policy.stop_ids = torch.tensor([-1])
    prompts = prompts_of(policy, questions())
    full = grpo.sample(policy, prompts, 1, 40, temperature=0)
    policy.stop_ids = full.tokens[0, 20:21]
    stopped = grpo.sample(policy, prompts, 1, 40, temperature=0)
    assert stopped.lengths[0] <= 21 and stopped.finished[0]
    for row in range(3):
        length = stopped.lengths[row]
        assert torch.equal(stopped.tokens[row, :length], full.tokens[row, :length])
        assert (stopped.tokens[row, length:] == policy.tokenizer.pad_token_id).all()


def test_a_forbidden_pad_token_leaves_no_nan(load, monkeypatch):
    """Finished rows hold the pad token until they are dropped; where it is forbidden its log-probability is -inf."""
    monkeypatch.setattr(grpo, "finished_check_interval", lambda device: 16)
    policy = load()
    policy.forbidden_ids = torch.cat([policy.forbidden_ids, torch.tensor([policy.tokenizer.pad_token_id])])
    rollouts = uneven_rollouts(policy, prompts_of(policy, questions()))
    assert rollouts.logprobs.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_waves_and_prefill_in_chunks_change_no_token(load, monkeypatch, family):
    """The naive twin: all rows at once, one prefill, a cache that is copied for each token."""
    policy = load(family, adapter=True)
    prompts = prompts_of(policy, questions())
    policy.stop_ids = torch.tensor([-1])
    with monkeypatch.context() as patch:
        patch.setattr(kv_cache, "GrowingLayer", plain_layer)
        whole = grpo.sample(policy, prompts, 2, 60, temperature=0)
    policy.stop_ids = whole.tokens[0, 30:31]
    monkeypatch.setattr(grpo, "PREFILL_TOKENS", 2 * prompts.input_ids.shape[1])  # two prompts, then one
    monkeypatch.setattr(kv_cache, "BLOCK", 7)
    for at_once in (0, 4, 3, 1):  # 3: a group is cut in two
        waves = grpo.sample(policy, prompts, 2, 60, temperature=0, rollouts_at_once=at_once)
        assert waves.lengths.min() <= 31, "no row was dropped"
        for row, length in enumerate(waves.lengths.tolist()):
            assert torch.equal(waves.tokens[row, :length], whole.tokens[row, :length])
        assert dlogp(policy, prompts, waves) <= 1e-4


def test_prefill_takes_as_many_prompts_as_it_may(load, monkeypatch):
    policy, sizes, first_forward = load(), [], grpo.first_forward
    prompts = prompts_of(policy, questions())
    monkeypatch.setattr(grpo, "first_forward", lambda model, input_ids, **prepared: sizes.append(len(input_ids))
                        or first_forward(model, input_ids, **prepared))
    for tokens in (2 * prompts.input_ids.shape[1], 1):
        monkeypatch.setattr(grpo, "PREFILL_TOKENS", tokens)
        grpo.sample(policy, prompts, 1, 1)
    assert sizes == [2, 1] + [1, 1, 1]


def test_a_wave_leaves_nothing_beside_the_next(load, monkeypatch):
    policy, prefill, living = load(), grpo.prefill, []

    def watched(*arguments):
        assert not any(reference() is not None for reference in living), "the last wave's cache is still there"
        cache, logits = prefill(*arguments)
        living[:] = weakref.ref(cache), weakref.ref(logits)
        return cache, logits

    monkeypatch.setattr(grpo, "prefill", watched)
    grpo.sample(policy, prompts_of(policy, questions()), 2, 20, rollouts_at_once=2)


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


def test_swapping_two_figures_changes_logprobs(load):
    policy = load()
    batch = questions(sizes=((70, 64),) * 3)
    rollouts = grpo.sample(policy, prompts := prompts_of(policy, batch), 2, 12)
    images = [batch[1].image, batch[0].image, batch[2].image]
    swapped = prompts_of(policy, [dataclasses.replace(q, image=image) for q, image in zip(batch, images)])
    with torch.no_grad():
        right = grpo.completion_logprobs(policy, prompts, rollouts, all_rows(rollouts))
        wrong = grpo.completion_logprobs(policy, swapped, rollouts, all_rows(rollouts))
    changed = (right - wrong).abs().amax(1)
    assert (changed[:4] > 1e-3).all() and (changed[4:] < 1e-4).all(), changed


def test_image_tokens_are_never_drawn(load):
    policy = load()
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    ids = policy.tokenizer.convert_tokens_to_ids(names)
    head = policy.base.get_output_embeddings()
    # A head that strongly wants them: its rows for these tokens get the direction of the final states.
    states = []
    hook = head.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0][:, -1].detach()))
    prompts = prompts_of(policy, questions())
    grpo.sample(policy, prompts, 1, 1)
    hook.remove()
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    head.weight[ids] = 100 * states[0].mean(0) / states[0].norm()
    with torch.no_grad():
        logits = head(states[0])
    assert set(logits.argmax(-1).tolist()) <= set(ids), "the head does not want image tokens: the test shows nothing"
    rollouts = grpo.sample(policy, prompts, 4, 40)
    assert not torch.isin(rollouts.tokens, torch.tensor(ids)).any()
    assert dlogp(policy, prompts, rollouts) <= 1e-4


# 2. Gradients


def gradient(policy, prompts, rollouts, advantages, tokens, base_logprobs=None, **flags):
    """The gradient of all rows' loss by all adapter weights, as one vector; `tokens` in a micro-batch."""
    grpo.accumulate_gradients(policy, prompts, rollouts, advantages, torch.tensor(all_rows(rollouts)),
                              grpo.Config(tokens_per_micro_batch=tokens, **flags), base_logprobs)
    flat = torch.cat([p.grad.flatten() for p in policy.parameters()])
    for p in policy.parameters():
        p.grad = None
    return flat


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def naive_gradient(policy, prompts, rollouts, advantages):
    """float64, one row at a time, no padding, no chunks, no cached figures, whole logits: the formula and no more.

    d/dtheta of  1/N sum_i sum_t -exp(logp_it - old_it) A_it,  N the number of completion tokens of all rows.
    """
    double = copy.deepcopy(policy.model).double().eval()
    base = double.get_base_model()
    group_size = len(rollouts.tokens) // len(prompts.ids)
    patches = prompts.image_grid_thw.prod(-1).tolist()
    loss = 0.0
    for row, length in enumerate(rollouts.lengths.tolist()):
        which = row // group_size
        visible = prompts.attention_mask[which].bool()
        completion = rollouts.tokens[row, :length]
        ids = torch.cat([prompts.input_ids[which, visible], completion])[None]
        types = torch.cat([prompts.mm_token_type_ids[which, visible], torch.zeros(length, dtype=torch.int)])[None]
        start = sum(patches[:which])
        logits = base(input_ids=ids, mm_token_type_ids=types,
                      pixel_values=prompts.pixel_values[start:start + patches[which]].double(),
                      image_grid_thw=prompts.image_grid_thw[which:which + 1], use_cache=False).logits[0]
        logits = logits[-length - 1:-1] / rollouts.temperature
        logits[:, policy.forbidden_ids] = -math.inf
        logp = logits - logits.logsumexp(-1, keepdim=True)
        logp = logp[torch.arange(length), completion]
        loss = loss - ((logp - rollouts.logprobs[row, :length].double()).exp()
                       * advantages[row, :length].double()).sum()
    (loss / rollouts.lengths.sum()).backward()
    return torch.cat([p.grad.flatten() for p in double.parameters() if p.requires_grad])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_is_the_closed_form_for_any_micro_batches(load, temperature):
    policy = load(adapter=True)
    prompts = prompts_of(policy, questions())
    rollouts = uneven_rollouts(policy, prompts, temperature=temperature)
    # Ratios away from 1, as if the policy had moved since it sampled.
    rollouts.logprobs -= 0.3 * torch.rand(rollouts.logprobs.shape, generator=torch.Generator().manual_seed(0))
    advantages = torch.randn(rollouts.tokens.shape, generator=torch.Generator().manual_seed(1))
    budgets = 1, 600, 10**6
    cuts = [grpo.micro_batches(prompts, rollouts, torch.arange(12), grpo.Config(tokens_per_micro_batch=budget))
            for budget in budgets]
    assert len(cuts[0]) == 12 and 1 < max(len(micro) for micro in cuts[1]) < 12 and len(cuts[2]) == 1
    one, some, whole = (gradient(policy, prompts, rollouts, advantages, budget) for budget in budgets)
    assert relative(one, whole) <= 1e-5 and relative(some, whole) <= 1e-5
    assert relative(whole, naive_gradient(policy, prompts, rollouts, advantages)) <= 1e-5


@pytest.mark.parametrize("budget", [1, 300, 1000, 10**6])
def test_micro_batches_keep_to_their_budget(budget):
    """Padding included: a row is as wide as the longest of its micro-batch, prompt and completion."""
    generator = torch.Generator().manual_seed(0)
    widths, lengths = (torch.randint(1, 200, (count,), generator=generator) for count in (6, 24))
    prompts = types.SimpleNamespace(ids=range(6), attention_mask=(torch.arange(200) < widths[:, None]).long())
    rollouts = types.SimpleNamespace(tokens=torch.zeros(24, 200), lengths=lengths)
    rows = torch.arange(24)[torch.arange(24) % 5 > 0]
    cut = grpo.micro_batches(prompts, rollouts, rows, grpo.Config(tokens_per_micro_batch=budget))
    assert torch.equal(torch.cat(cut).sort().values, rows)
    for micro in cut:
        assert len(micro) == 1 or len(micro) * (widths[micro // 4] + lengths[micro]).max() <= budget
    assert budget == 1 or len(cut) <= 3 * (widths[rows // 4] + lengths[rows]).sum() / budget + 1, "too many"


def test_checkpointing_and_logit_chunks_change_nothing(load, monkeypatch):
    gradients, rollouts = [], None
    for chunk, checkpointing in ((10**6, "off"), (7, "on")):
        monkeypatch.setattr(grpo, "LOGIT_CHUNK", chunk)
        policy = load(adapter=True, activation_checkpointing=checkpointing)
        assert policy.base.is_activation_checkpointing == (checkpointing == "on")
        prompts = prompts_of(policy, questions())
        rollouts = rollouts or uneven_rollouts(policy, prompts)
        advantages = torch.ones_like(rollouts.logprobs)
        gradients.append(gradient(policy, prompts, rollouts, advantages, 1000))
    assert relative(*gradients) <= 1e-5


def test_gradient_reaches_the_adapter_only(load):
    policy = load(adapter=True)
    prompts = prompts_of(policy, questions())
    rollouts = grpo.sample(policy, prompts, 2, 8)
    grpo.accumulate_gradients(policy, prompts, rollouts, torch.ones_like(rollouts.logprobs),
                              torch.tensor(all_rows(rollouts)), grpo.Config())
    for name, weight in policy.model.named_parameters():
        assert (weight.grad is not None and weight.grad.abs().sum() > 0) == ("lora_" in name), name


# 3. Greedy decoding = model.generate


def generated(policy, prompts, max_tokens):
    """What transformers' own greedy decoding gives."""
    return policy.base.generate(
        input_ids=prompts.input_ids, attention_mask=prompts.attention_mask, pixel_values=prompts.pixel_values,
        image_grid_thw=prompts.image_grid_thw, mm_token_type_ids=prompts.mm_token_type_ids, do_sample=False,
        temperature=None, top_p=None, top_k=None, max_new_tokens=max_tokens,
        suppress_tokens=policy.forbidden_ids.tolist(), eos_token_id=policy.stop_ids.tolist(),
        pad_token_id=policy.tokenizer.pad_token_id)[:, prompts.input_ids.shape[1]:]


def check_greedy(rollouts, reference):
    """Compares two completions a prompt with the reference's one, token by token."""
    for row, length in enumerate(rollouts.lengths.tolist()):
        assert torch.equal(rollouts.tokens[row, :length], reference[row // 2, :length]), f"row {row}"


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_generate(load, family):
    policy = load(family, adapter=True)
    for seed in (0, 1):  # twice in a row, with other figures: no state may stay behind
        prompts = prompts_of(policy, questions(seed))
        policy.stop_ids = torch.tensor([-1])
        endless = grpo.sample(policy, prompts, 2, 40, temperature=0)
        assert all(len(set(row.tolist())) >= 5 for row in endless.tokens), "the answers do not vary"
        check_greedy(endless, generated(policy, prompts, 40))
        policy.stop_ids = endless.tokens[0, 20:21]
        stopped = grpo.sample(policy, prompts, 2, 40, temperature=0)
        check_greedy(stopped, generated(policy, prompts, 40))
        assert stopped.finished[0] and stopped.lengths[0] <= 21


def decode_mutants(policy, prompts):
    """name -> what it does to the arguments of a decoding forward pass of two rows a prompt."""
    delta = (grpo.next_position(grpo.prompt_positions(policy.base, prompts)) - prompts.attention_mask.sum(1))
    padding = (prompts.attention_mask == 0).sum(1)
    assert delta.any() and padding.any()
    delta, padding = (x.repeat_interleave(2)[None, :, None] for x in (delta, padding))
    return {"no change": lambda p, m: (p, m), "no rope delta": lambda p, m: (p - delta, m),
            "positions off by one": lambda p, m: (p + 1, m), "padding counted": lambda p, m: (p + padding, m),
            "padding visible": lambda p, m: (p, torch.ones_like(m))}


@pytest.mark.parametrize("name", ["no change", "no rope delta", "positions off by one", "padding counted",
                                  "padding visible"])
def test_greedy_comparison_sees_mutants(load, monkeypatch, name):
    policy = load(adapter=True)
    policy.stop_ids = torch.tensor([-1])  # no row is dropped, so rows stay in the order that the mutants assume
    prompts = prompts_of(policy, questions())
    reference, mutate = generated(policy, prompts, 40), decode_mutants(policy, prompts)[name]
    forward, decodes = policy.base.forward, []

    def mutated(*args, **inputs):
        if inputs["input_ids"].shape[1] == 1:
            decodes.append(1)
            inputs["position_ids"], inputs["attention_mask"] = mutate(inputs["position_ids"], inputs["attention_mask"])
        return forward(*args, **inputs)

    monkeypatch.setattr(policy.base, "forward", mutated)
    rollouts = grpo.sample(policy, prompts, 2, 40, temperature=0)
    assert len(decodes) == 39
    if name == "no change":
        check_greedy(rollouts, reference)
    else:
        with pytest.raises(AssertionError, match="row"):
            check_greedy(rollouts, reference)


# Draws


def chi_square_p(counts, probabilities):
    """p-value of Pearson's test, cells of expectation below 5 put together."""
    expected = probabilities.double() * counts.sum()
    small = expected < 5
    counts = torch.cat([counts[~small].double(), counts[small].sum()[None].double()])
    expected = torch.cat([expected[~small], expected[small].sum()[None]])
    keep = expected > 0
    assert not counts[~keep].any(), "drawn, though its probability is 0"
    statistic = ((counts - expected)[keep] ** 2 / expected[keep]).sum()
    freedom = torch.tensor(float(keep.sum() - 1))
    return torch.special.gammaincc(freedom / 2, statistic.float() / 2).item()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_frequencies_match_the_softmax(load, monkeypatch, temperature):
    """The folder's generation_config says top_k 20 and top_p 0.95: neither may cut anything off."""
    monkeypatch.setattr(vision_tokens, "format_question", lambda question, with_solution: "短")  # 20,000 prompts' cache
    policy = load()
    assert policy.base.generation_config.top_k == 20 and policy.base.generation_config.top_p == 0.95
    policy.stop_ids = torch.tensor([-1])
    prompts = prompts_of(policy, questions()[:1])
    torch.manual_seed(0)
    pairs = torch.cat([grpo.sample(policy, prompts, 1000, 2, temperature).tokens for _ in range(12)])  # (12000, 2)

    def probabilities(*continuation):
        ids = torch.cat([prompts.input_ids[0], torch.tensor(continuation, dtype=torch.long)])[None]
        types = torch.nn.functional.pad(prompts.mm_token_type_ids, (0, len(continuation)))
        with torch.no_grad():
            logits = policy.base(input_ids=ids, mm_token_type_ids=types, pixel_values=prompts.pixel_values,
                                 image_grid_thw=prompts.image_grid_thw).logits[0, -1]
        logits[policy.forbidden_ids] = -math.inf
        return (logits / temperature).softmax(-1)

    vocabulary = len(probabilities())
    first = pairs[:, 0].bincount(minlength=vocabulary)
    assert (first > 0).sum() > 25, "too few different tokens to see a top-k of 20"
    assert chi_square_p(first, probabilities()) > 1e-3
    for token in first.argsort(descending=True)[:3].tolist():
        second = pairs[pairs[:, 0] == token, 1].bincount(minlength=vocabulary)
        assert chi_square_p(second, probabilities(token)) > 1e-3


def test_nucleus_draws_from_it_but_reports_the_full_softmax(load):
    policy = load()
    prompts = prompts_of(policy, questions()[:1])
    torch.manual_seed(0)
    rollouts = grpo.sample(policy, prompts, 500, 1, top_p=0.5)
    full = grpo.sample(policy, prompts, 500, 1)
    drawn, every = set(rollouts.tokens[:, 0].tolist()), set(full.tokens[:, 0].tolist())
    assert drawn < every
    with torch.no_grad():
        logprobs = grpo.completion_logprobs(policy, prompts, rollouts, range(20))
    assert (logprobs - rollouts.logprobs[:20]).abs().max() <= 1e-4
    mass = {t: p for t, p in zip(rollouts.tokens[:, 0].tolist(), rollouts.logprobs[:, 0].exp().tolist())}
    assert sum(mass.values()) - min(mass.values()) < 0.5 <= sum(mass.values())


# NF4


def nf4_policy(load):
    policy = load(adapter=True, quantization="nf4")
    linear = [m for m in policy.base.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert linear and all(m.weight.quant_state is not None for m in linear)
    return policy


def test_nf4_sampler_equals_learner(load):
    policy = nf4_policy(load)
    prompts = prompts_of(policy, questions())
    assert dlogp(policy, prompts, uneven_rollouts(policy, prompts)) <= 1e-4


def test_nf4_gradient_after_a_rollout_is_that_of_the_dequantised_model(load):
    policy, plain = nf4_policy(load), load(adapter=True)
    prompts = prompts_of(policy, questions())
    rollouts = uneven_rollouts(policy, prompts)
    targets = dict(plain.model.named_modules())
    for name, module in policy.model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            weight = bnb.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
            targets[name].weight.data = weight.view_as(targets[name].weight).float()
    advantages = torch.randn(rollouts.tokens.shape, generator=torch.Generator().manual_seed(1))
    ours = gradient(policy, prompts, rollouts, advantages, 1000)
    assert relative(ours, gradient(plain, prompts_of(plain, questions()), rollouts, advantages, 1000)) <= 1e-3


MIXERS = {"linear_attn": ("in_proj_qkv", "in_proj_z", "out_proj"),
          "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj")}


def linear_layers():
    """The names that must be in 4-bit and adapted: layers 0 and 2 are recurrent, 1 and 3 attention."""
    kinds = ["linear_attn", "self_attn", "linear_attn", "self_attn"]
    return {f"model.language_model.layers.{i}.{part}.{name}" for i, kind in enumerate(kinds)
            for part, names in ((kind, MIXERS[kind]), ("mlp", ("gate_proj", "up_proj", "down_proj")))
            for name in names}


def test_nf4_and_lora_sit_on_exactly_the_right_modules(load):
    policy = load(quantization="nf4")
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
def test_lora_of_the_other_families(load, family):
    adapted = {name.removesuffix(".lora_A.default") for name, _ in load(family).base.named_modules()
               if name.endswith(".lora_A.default")}
    assert adapted == {f"model.language_model.layers.{i}.{name}" for i in range(4) for name in (
        *(f"self_attn.{p}_proj" for p in "qkvo"), *(f"mlp.{p}_proj" for p in ("gate", "up", "down")))}


# Advantages


def test_group_advantages():
    rewards = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1], [0.1] * 4])
    plain, normalised = grpo.group_advantages(rewards), grpo.group_advantages(rewards, normalize_std=True)
    assert torch.allclose(plain[0], torch.tensor([0.75, -0.25, -0.25, -0.25]))
    assert torch.allclose(normalised[0], plain[0] / 0.5, atol=1e-6)
    assert (plain[1:] == 0).all() and (normalised[1:] == 0).all()
    seven = torch.full((1, 7), 0.1)  # the float32 mean of seven 0.1 is not 0.1
    assert (seven - seven.mean()).abs().max() > 0
    assert (grpo.group_advantages(seven) == 0).all() and (grpo.group_advantages(seven, True) == 0).all()
