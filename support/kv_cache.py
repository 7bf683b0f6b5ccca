"""The sampler's cache: joined from several prefills, grown in blocks, its recurrent states updated in place."""

import functools

import torch
import torch.nn.functional as F
from transformers.cache_utils import DynamicLayer

BLOCK = 128  # tokens by which an attention layer's buffers grow


class GrowingLayer(DynamicLayer):
    """An attention layer with room for coming tokens; DynamicLayer copies all that it holds for each token."""

    def __init__(self, keys, values):
        """keys, values: (rows, heads, tokens, head width)."""
        super().__init__()
        self.lazy_initialization(keys, values)
        self.buffers = [keys, values]
        self.show(keys.shape[-2])

    def update(self, key_states, value_states, *args, **kwargs):
        """Appends states (rows, heads, new tokens, head width) -> all keys and values, as views of the buffers."""
        length, new = self.keys.shape[-2], key_states.shape[-2]
        if length + new > self.buffers[0].shape[-2]:
            self.buffers = [F.pad(buffer[:, :, :length], (0, 0, 0, max(BLOCK, new))) for buffer in self.buffers]
        for buffer, states in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, length:length + new] = states
        return self.show(length + new)

    def reorder_cache(self, index):
        """Rows become `index`, an int tensor; repeats and omissions are allowed."""
        self.buffers = [buffer.index_select(0, index) for buffer in self.buffers]
        self.show(self.keys.shape[-2])

    def show(self, length):
        self.keys, self.values = (buffer[:, :, :length] for buffer in self.buffers)
        return self.keys, self.values


def join_caches(caches):
    """Caches of prompts padded to one width -> one cache of all their rows, whose attention layers grow in blocks."""
    joined = caches[0]
    for i, layer in enumerate(joined.layers):  # so that hardly more than one copy exists at a time
        parts = [cache.layers[i] for cache in caches]
        for cache in caches[1:]:
            cache.layers[i] = None
        if isinstance(layer, DynamicLayer):
            layer.keys = torch.cat([part.keys for part in parts])
            layer.values = torch.cat([part.values for part in parts])
        for name in ("conv_states", "recurrent_states"):
            for key in getattr(layer, name, {}):
                getattr(layer, name)[key] = torch.cat([getattr(part, name)[key] for part in parts])
        if type(layer) is DynamicLayer:  # not a layer with a sliding window, which is short anyway
            joined.layers[i] = GrowingLayer(layer.keys, layer.values)
    return joined


def extend(cache, tokens):
    """Appends `tokens` tokens of zeros to the attention layers, as if they had been drawn."""
    for layer in cache.layers:
        if isinstance(layer, GrowingLayer):
            rows, heads, length, width = layer.keys.shape
            for first in range(0, tokens, BLOCK):
                layer.update(*layer.keys.new_zeros(2, rows, heads, min(BLOCK, tokens - first), width))


def one_token_delta_rule(reference):
    """The library's recurrent rule -> the same for one token without gradients, which updates the state in place.

    The reference walks over the states a dozen times for a token, with copies: most of the sampler's time.
    S <- exp(g) S;  S <- S + k (beta (v - k S));  out = q S   (gated delta rule, arXiv 2412.06464)
    query, key: (rows, 1, key heads, K); value: (rows, 1, heads, V); g, beta: (rows, 1, heads); S: (rows, heads, K, V)
    """
    @functools.wraps(reference)
    def rule(query, key, value, g, beta, initial_state=None, use_qk_l2norm_in_kernel=False, **others):
        if query.shape[1] != 1 or initial_state is None or torch.is_grad_enabled():
            return reference(query, key, value, g=g, beta=beta, initial_state=initial_state,
                             use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **others)
        rows, heads, key_width, value_width = initial_state.shape

        def each_head(x):  # -> (rows * heads, 1, K)
            x = x.float()
            if use_qk_l2norm_in_kernel:
                x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
            return x.repeat_interleave(heads // x.shape[2], 2).reshape(-1, 1, key_width)

        key, query = each_head(key), each_head(query) / key_width**0.5
        state = initial_state.view(-1, key_width, value_width)
        state.mul_(g.float().exp().reshape(-1, 1, 1))
        error = value.float().reshape(-1, 1, value_width) - torch.bmm(key, state)
        state.baddbmm_(key.transpose(1, 2), error * beta.float().reshape(-1, 1, 1))
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
