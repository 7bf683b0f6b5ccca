"""The learner that runs each prompt once against a plain forward pass of each row: all of support/branching.py."""

import contextlib
import dataclasses
import functools
import inspect
import sys
import types

import pytest
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen
from batches import (changed_inputs, gradient, learned_logprobs, moved_away, naive_logprobs, numbers,
                     prompts_of, questions, relative, set_advantages, two_turns)
from conftest import FAMILIES
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

import grpo
from support import branching
from support.branching import Branches
from support.models import token_mixer

RULE, CONVOLUTION = (inspect.unwrap(getattr(qwen, name)) for name in (
    "torch_chunk_gated_delta_rule", "causal_conv1d_fn"))  # the library's own, in torch
REDUCTIONS = {  # the weight of token t of a row, over its rows' numbers of trained tokens, written out
    "token": lambda own, lengths, max_tokens: 1 / sum(lengths),
    "sequence": lambda own, lengths, max_tokens: 1 / own / len(lengths),
    "constant": lambda own, lengths, max_tokens: 1 / (len(lengths) * max_tokens)}


def uneven(policy):
    """Rows of two prompts, of unlike lengths; ratios are not 1 and advantages differ from token to token."""
    prompts, lengths = prompts_of(policy, questions(sizes=((70, 64), (130, 96)))), (1, 20, 7, 12, 3, 16)
    policy.stop_ids = torch.tensor([-1])
    prompts = prompts[:1] * 2 + prompts[1:] * 4
    rows = grpo.sample(policy, prompts, max(lengths), uniforms=numbers(len(lengths), max(lengths)))
    cut = {name: [getattr(row, name)[:n] for row, n in zip(rows, lengths)] for name in (
        "tokens", "logprobs", "entropies", "trained")}
    rows = [dataclasses.replace(row, **{name: cut[name][i] for name in cut}) for i, row in enumerate(rows)]
    return set_advantages(moved_away(rows, 0.3))


@contextlib.contextmanager
def checkpointed(policy, on):
    if on:
        policy.base.activation_checkpointing_enable()
    assert policy.base.is_activation_checkpointing == on
    try:
        yield
    finally:
        policy.base.activation_checkpointing_disable()


def difference(policy, rows):
    """Largest difference between the log-probabilities of one pass over a prompt's rows and of a pass for each row."""
    found = learned_logprobs(policy, rows)
    with torch.no_grad():
        return max((found[row][0] - naive_logprobs(policy, row)).abs().max().item() for row in rows)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_pass_for_all_rows_is_a_pass_for_each(shared, family, quantization):
    """Log-probabilities, and gradients with and without activation checkpointing for every reduction."""
    policy = shared(family, layers=2, quantization=quantization)
    rows = uneven(policy)
    assert difference(policy, rows) <= 1e-5
    naive = [naive_logprobs(policy, row) for row in rows]
    lengths = [len(row.tokens) for row in rows]
    losses = [-(logprobs - row.logprobs).exp() * row.advantage for logprobs, row in zip(naive, rows)]
    for reduction, weight in REDUCTIONS.items():
        loss = sum(weight(len(each), lengths, 30) * each.sum() for each in losses)
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, policy.parameters(), retain_graph=True)])
        for checkpointing in (True, False):
            with checkpointed(policy, checkpointing):
                ours = gradient(policy, rows, loss_reduction=reduction, max_tokens=30)
            assert relative(ours, expected) <= 1e-5, (reduction, checkpointing)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_two_turns_and_prompts_without_a_figure(shared, family):
    policy = shared(family, layers=2)
    prompts = prompts_of(policy, questions(sizes=(None, (70, 64))))
    assert difference(policy, two_turns(policy, prompts)) <= 1e-5


def test_the_model_is_itself_where_there_are_no_branches(load):
    policy = load()
    ids = torch.arange(30, 90).view(2, 30)
    with torch.no_grad():
        ours = policy.base(input_ids=ids).logits
        policy.base.set_attn_implementation({"text_config": "sdpa"})
        assert torch.equal(policy.base(input_ids=ids).logits, ours)


# The operations alone. A row is computed for itself, behind its prompt.

LENGTHS = (1, 3, 64, 65)


def made_up(*shape):
    return torch.randn(*shape).requires_grad_()


def alone(inputs, dim, prompt, operation):
    """The operation over prompt and completion for each completion, and over the prompt -> what the branches give."""
    parts = [x.split([prompt, *LENGTHS], dim) for x in inputs]
    outs = [operation(*(part[0] for part in parts))]
    for i, length in enumerate(LENGTHS, 1):
        out = operation(*(torch.cat([part[0], part[i]], dim) for part in parts))
        outs.append(out.narrow(dim, prompt, length))
    return torch.cat(outs, dim)


def check_same(ours, naive, inputs, tolerance):
    assert (ours - naive).abs().max() <= tolerance * naive.abs().max()
    direction = torch.randn_like(naive)
    for a, b in zip(*(torch.autograd.grad((out * direction).sum(), inputs) for out in (ours, naive))):
        assert relative(a, b) <= tolerance


@pytest.mark.parametrize("prompt", [3, 4, 64, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_convolution(prompt, bias):
    torch.manual_seed(0)
    x, weight, bias = made_up(1, 6, prompt + sum(LENGTHS)), made_up(6, 4), made_up(6) if bias else None
    operation = functools.partial(CONVOLUTION, weight=weight, bias=bias, activation="silu")
    ours = branching.branching_convolution(CONVOLUTION)(x, weight, bias, activation="silu",
                                                        branches=Branches(prompt, LENGTHS))
    check_same(ours, alone([x], 2, prompt, operation), [x, weight], 1e-5)


@pytest.mark.parametrize("prompt", [3, 4, 64, 70])
@pytest.mark.parametrize("key_heads, heads", [(2, 2), (1, 4)])
def test_delta_rule(prompt, key_heads, heads):
    torch.manual_seed(0)
    n = prompt + sum(LENGTHS)
    inputs = [made_up(1, n, key_heads, 8), made_up(1, n, key_heads, 8), made_up(1, n, heads, 16),
              (-torch.rand(1, n, heads)).requires_grad_(), torch.rand(1, n, heads).requires_grad_()]

    def operation(query, key, value, g, beta):
        return RULE(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    *qkv, g, beta = inputs
    ours, state = branching.branching_delta_rule(RULE)(
        *qkv, g=g, beta=beta, branches=Branches(prompt, LENGTHS), initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=True)
    assert state is None
    check_same(ours, alone(inputs, 1, prompt, operation), inputs, 1e-5)


# What would be wrong


def sees_its_neighbour(module, *inputs, branches=None, **options):
    return branching.attention(module, *inputs, **options)


def starts_from_zero(*inputs, initial_state=None, **options):
    return RULE(*inputs, initial_state=None, **options)


def sees_nothing_of_the_prompt(hidden_states, *inputs, branches=None, **options):
    prompt, completions = branches.split(hidden_states, -1)
    return torch.cat([CONVOLUTION(part, *inputs, **options) for part in (prompt, *completions)], -1)


def starts_from_other_heads(*inputs, initial_state=None, **options):
    return RULE(*inputs, initial_state=initial_state if initial_state is None else initial_state.roll(1, 1), **options)


def runs_on(rows):
    """Positions of completions that follow the one before, not the prompt."""
    prompt = len(rows[0].prompt.ids)

    def change(inputs):
        inputs["position_ids"] = inputs["position_ids"].clone()
        inputs["position_ids"][..., prompt:] = rows[0].prompt.next_position + torch.arange(
            inputs["position_ids"].shape[-1] - prompt)
    return change


@pytest.fixture
def in_the_model(monkeypatch):
    """Puts a function in place of the one that the model calls by this name."""
    return lambda name, function: monkeypatch.setattr(qwen, name, function)


def test_broken_branches_are_seen(shared, in_the_model):
    policy = shared(layers=2)
    rows = uneven(policy)[2:]  # of one prompt
    naive = {row: naive_logprobs(policy, row).detach() for row in rows}

    def error():
        return max((logprobs - naive[row]).abs().max() for row, (logprobs, _) in learned_logprobs(policy, rows).items())

    assert error() <= 1e-5
    try:
        AttentionInterface.register(branching.ATTENTION, sees_its_neighbour)
        assert error() > 1e-2
    finally:
        AttentionInterface.register(branching.ATTENTION, branching.attention)
    with changed_inputs(policy.base.model, runs_on(rows)):
        assert error() > 1e-3
    for name, wrong in (
            ("torch_chunk_gated_delta_rule", branching.branching_delta_rule(starts_from_zero)),
            ("torch_chunk_gated_delta_rule", branching.branching_delta_rule(starts_from_other_heads)),
            ("causal_conv1d_fn", sees_nothing_of_the_prompt)):
        right = getattr(qwen, name)
        in_the_model(name, wrong)
        assert error() > 1e-3, wrong
        in_the_model(name, right)
    assert error() <= 1e-5


# Kernels of other packages, by stubs with their signatures that compute what the kernels do


def chunk_gated_delta_rule(q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, cu_seqlens=None, head_first=False):
    """fla.ops.gated_delta_rule 0.4: states are float32 (rows, heads, K, V), contiguous; no dtype is mixed."""
    assert cu_seqlens is None and scale is None and not head_first and q.dtype == k.dtype == v.dtype
    if initial_state is not None:
        assert initial_state.is_contiguous() and initial_state.dtype == torch.float32
        assert initial_state.shape == (len(q), v.shape[2], q.shape[-1], v.shape[-1])
    return RULE(q, k, v, g=g, beta=beta, initial_state=initial_state, output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
                     final_states_out=None, activation=None):
    assert seq_idx is None and initial_states is None and not return_final_states and final_states_out is None
    assert activation in (None, "silu", "swish") and (x.stride(2) == 1 or x.stride(1) == 1)
    return CONVOLUTION(x, weight, bias, activation=activation)


def installed(monkeypatch, name, package, kernel, reference):
    """The kernel as transformers wraps it where `package` can be imported; its calls are noted."""
    calls, module = [], types.ModuleType(package)

    @functools.wraps(kernel)
    def noting(*args, **options):
        calls.append(options)
        return kernel(*args, **options)

    setattr(module, name, noting)
    parts = {"fla": ["fla", "fla.ops", "fla.ops.gated_delta_rule"]}.get(package, [package])
    for part in parts:
        monkeypatch.setitem(sys.modules, part, module)
    module.ops = module.gated_delta_rule = module
    return use_kernel_func_from_hub_with_fallback(name, package)(reference), calls


def test_kernels_give_the_same(shared, in_the_model, monkeypatch):
    policy = shared(layers=2)
    rows = uneven(policy)
    before = [own for pair in learned_logprobs(policy, rows).values() for own in pair], gradient(policy, rows)
    for ours, name, package, kernel, reference in (
            ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule", "fla", chunk_gated_delta_rule, RULE),
            ("causal_conv1d_fn", "causal_conv1d_fn", "causal_conv1d", causal_conv1d_fn, CONVOLUTION)):
        kernel, calls = installed(monkeypatch, name, package, kernel, reference)
        in_the_model(ours, token_mixer(ours, kernel, kernel=True))
        after = [own for pair in learned_logprobs(policy, rows).values() for own in pair], gradient(policy, rows)
        assert calls and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(after[0], before[0]))
        assert relative(after[1], before[1]) <= 1e-6


class Products(TorchFunctionMode):
    """Notes the mask of each attention product with its numbers of queries and keys."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.calls.append((args[0].shape[2], args[1].shape[2], kwargs))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen2_vl"])
def test_no_mask_is_made(shared, family):
    """A mask of length x length would take more memory than the rest, and send CUDA to the slow kernel."""
    policy = shared(family, layers=2)
    prompts = prompts_of(policy, questions()[:1])
    policy.stop_ids = torch.arange(0, 250, 8)
    rows = grpo.sample(policy, prompts * 4, 12)
    lengths, prompt = [len(row.tokens) for row in rows], len(prompts[0].ids)
    with Products() as products, torch.no_grad():
        grpo.completion_logprobs(policy, rows, 1.0)
    layers = 1 if family == "qwen3_5" else 2
    assert len(products.calls) == layers * (1 + len(rows))
    for i, (queries, keys, options) in enumerate(products.calls):
        mask, row = options.get("attn_mask"), i % (1 + len(rows))
        if row == 0:
            assert mask is None and options["is_causal"] and queries == keys == prompt
        else:
            assert isinstance(mask, CausalBias) and mask.variant == CausalVariant.LOWER_RIGHT
            assert (mask.seq_len_q, mask.seq_len_kv) == (queries, keys) == (lengths[row - 1], prompt + lengths[row - 1])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_library_makes_no_mask_for_the_layers(shared, family):
    policy, masks = shared(family, layers=2), []
    rows = uneven(policy)[2:]

    def watch(inputs):
        masks.append(inputs.get("attention_mask"))

    (attention,) = [m for n, m in policy.base.named_modules() if n.endswith("layers.1.self_attn")]
    with changed_inputs(attention, watch), torch.no_grad():
        grpo.completion_logprobs(policy, rows, 1.0)
    assert masks == [None]
