"""The sampler's cache of keys, values and recurrent states: joined from several prefills, grown in blocks, and for the
recurrent layers updated in place by a token.
"""

import functools

import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicLayer

BLOCK = 128  # tokens by which an attention layer's buffers grow


class GrowingLayer(DynamicLayer):
    """An attention layer whose buffers have room for coming tokens. DynamicLayer copies all it holds for each token."""

    def __init__(self, keys, values):
        """keys, values: (rows, heads, tokens, head width)."""
        super().__init__()
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.buffers = [keys, values]
        self.keys, self.values = keys, values

    def update(self, key_states, value_states, *args, **kwargs):
        """Appends states (rows, heads, new tokens, head width) -> all keys and values, as views of the buffers."""
        length, new = self.keys.shape[-2], key_states.shape[-2]
        if length + new > self.buffers[0].shape[-2]:
            for i, buffer in enumerate(self.buffers):
                self.keys = self.values = None  # the old buffer goes as soon as its copy is there
                self.buffers[i] = F.pad(buffer[:, :, :length], (0, 0, 0, max(BLOCK, new)))
                del buffer
        for buffer, states in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, length:length + new] = states
        return self.show(length + new)

    def show(self, length):
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)
        return self.keys, self.values

    def reorder_cache(self, index):
        """Rows become `index`, an int tensor; repeats and omissions are allowed."""
        length = self.keys.shape[-2]
        for i in range(2):
            self.keys = self.values = None
            self.buffers[i] = self.buffers[i].index_select(0, index)
        self.show(length)


def join_caches(caches):
    """Caches of prompts padded to one width -> one cache of all their rows, whose attention layers grow in blocks.

    Takes the caches apart layer by layer, so that hardly more than one copy exists at a time.
    """
    for i, layer in enumerate(caches[0].layers):
        parts = [cache.layers[i] for cache in caches]
        for cache in caches[1:]:
            cache.layers[i] = None
        if isinstance(layer, DynamicLayer):
            layer.keys, layer.values = (torch.cat([getattr(part, name) for part in parts]) for name in
                                        ("keys", "values"))
        for name in ("conv_states", "recurrent_states"):
            for key in getattr(layer, name, {}):
                states = [getattr(part, name)[key] for part in parts]
                getattr(layer, name)[key] = torch.cat(states) if len(states) > 1 else states[0]
        if type(layer) is DynamicLayer:  # not a layer with a sliding window, which is short anyway
            caches[0].layers[i] = GrowingLayer(layer.keys, layer.values)
    return caches[0]


def extend(cache, tokens):
    """Appends `tokens` tokens of zeros to the attention layers, as if they had been drawn."""
    for layer in cache.layers:
        if isinstance(layer, GrowingLayer):
            rows, heads, length, width = layer.keys.shape
            for some in torch.arange(tokens).split(BLOCK):
                layer.update(*layer.keys.new_zeros(2, rows, heads, len(some), width))


# A gated delta net keeps a state S (key width, value width) for each head. The library's reference in torch walks over
# it a dozen times for a token, with copies; for one token that is most of the sampler's time.


def one_token_delta_rule(reference):
    """The library's recurrent rule -> the same for one token without gradients, which updates the state in place.

    S <- exp(g) S;  S <- S + k (beta (v - k S));  out = q S   (gated delta rule, arXiv 2412.06464)
    query, key: (rows, 1, key heads, K); value: (rows, 1, heads, V); g, beta: (rows, 1, heads); S: (rows, heads, K, V)
    """
    @functools.wraps(reference)
    def rule(query, key, value, g, beta, initial_state=None, use_qk_l2norm_in_kernel=False, **others):
        if query.shape[1] != 1 or initial_state is None or torch.is_grad_enabled():
            return reference(query, key, value, g=g, beta=beta, initial_state=initial_state,
                             use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **others)
        rows, heads, key_width, value_width = initial_state.shape
        count = rows * heads

        def each_head(x):
            x = x.float()
            if use_qk_l2norm_in_kernel:
                x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
            return x.repeat_interleave(heads // x.shape[2], 2).reshape(count, 1, key_width)

        key, query = each_head(key), each_head(query) / key_width**0.5
        state = initial_state.view(count, key_width, value_width)
        state.mul_(g.float().exp().reshape(count, 1, 1))
        error = value.float().reshape(count, 1, value_width) - torch.bmm(key, state)
        state.baddbmm_(key.transpose(1, 2), error * beta.float().reshape(count, 1, 1))
        return torch.bmm(query, state).view(rows, 1, heads, value_width).to(value.dtype), initial_state
    return rule


def one_token_convolution(reference):
    """The library's convolution of one more token -> the same without a general convolution.

    hidden_states: (rows, channels, 1); conv_state: (rows, channels, width), the last inputs; weight: (channels, width)
    """
    @functools.wraps(reference)
    def convolution(hidden_states, conv_state, weight, bias=None, activation=None):
        if hidden_states.shape[-1] != 1 or bias is not None or activation != "silu" or torch.is_grad_enabled():
            return reference(hidden_states, conv_state, weight, bias, activation)
        conv_state.copy_(torch.cat([conv_state[..., 1:], hidden_states], -1))
        out = (conv_state.float() * weight.float()).sum(-1, keepdim=True).to(weight.dtype)
        return F.silu(out).to(hidden_states.dtype)
    return convolution
