import functools
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test needs a hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from tiny import make_policy_folder

import grpo

FAMILIES = ("qwen3_5", "qwen3_vl", "qwen2_5_vl", "qwen2_vl")
GEOLAUX = Path(__file__).parents[2] / "shared" / "geolaux"

# Two threads on matrices this small gain nothing, and cost 15 times the time where something else keeps a core busy.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for programs that tests start


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """family, number of layers -> folder of its tiny policy, made at first use. Two layers are one of each kind."""
    made = {}

    def folder(family="qwen3_5", layers=2):
        if (family, layers) not in made:
            made[family, layers] = make_policy_folder(tmp_path_factory.mktemp(family), family, layers=layers)
        return made[family, layers]

    return folder


@pytest.fixture(scope="session")
def load(folders):
    """Loads a fresh tiny policy through load_policy, the adapter's B matrices random instead of 0 if asked."""

    def policy(family="qwen3_5", adapter=False, layers=2, **flags):
        config = grpo.Config(base_model=str(folders(family, layers)), device="cpu", lora_rank=4, **flags)
        policy = grpo.load_policy(config)
        if adapter:
            torch.manual_seed(1)
            for name, weight in policy.model.named_parameters():
                if "lora_B" in name:
                    weight.data.normal_(std=0.05)
        return policy

    return policy


@pytest.fixture(scope="session")
def made(load):
    """load, with random B matrices, that gives the same policy to all who ask for the same."""
    return functools.cache(functools.partial(load, adapter=True))


@pytest.fixture
def shared(made):
    """A policy that several tests use and none trains; tokens that a test stops at or forbids, and gradients, go again.

    Qwen3.5 has two layers of each kind: what a cache or a mask does to one layer, the next of its kind must see.
    """
    used = []

    def policy(family="qwen3_5", layers=None, **flags):
        policy = made(family, layers=layers or (4 if family == "qwen3_5" else 2), **flags)
        used.append((policy, policy.stop_ids, policy.forbidden_ids))
        return policy

    yield policy
    for policy, stop_ids, forbidden_ids in reversed(used):
        policy.stop_ids, policy.forbidden_ids = stop_ids, forbidden_ids
        for p in policy.parameters():
            p.grad = None


@pytest.fixture(scope="session")
def geolaux():
    if not GEOLAUX.is_dir():
        pytest.skip("the real figures of ../shared/geolaux are not on this machine")
    return GEOLAUX
