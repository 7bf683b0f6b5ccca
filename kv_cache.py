"""The sampler's cache of keys, values and recurrent states: joined from several prefills, grown in blocks."""

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
