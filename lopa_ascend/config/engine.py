"""The configuration of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from lopa_ascend.config.decoding import GraphParams
from lopa_ascend.config.errors import ParameterError
from lopa_ascend.config.kinds import INT64_MAX, AnyText, Boolean, Bytes, Choice, Choices, Integer, Number
from lopa_ascend.config.model import ModelConfig
from lopa_ascend.config.settings import DERIVED, Section, check_settings, declare, settings

GRAPH_MODES_BY_DEVICE = {
    "cpu": ("eager", "inductor"),
    "npu": ("npugraph_ex", "ge", "eager"),
    "cuda": ("cuda_graphs", "eager"),
}
"""The first mode of a device is its default."""
GRAPH_MODES = tuple(dict.fromkeys(("eager", *(mode for modes in GRAPH_MODES_BY_DEVICE.values() for mode in modes))))
WEIGHT_DTYPES = ("auto", "float32", "bfloat16")
QUANTIZATIONS = {"w8a8": ("int8", 0), "w4a8": ("int4", 32), "w4a8_g128": ("int4", 128), "fp8": ("fp8", 0)}
"""The weights' codes, and the number of inputs that share a scale of int4 weights."""
INT8_GRAPH_MODES = tuple(mode for mode in GRAPH_MODES if mode != "inductor")
INT8_LAYERS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""The linear layers that quantisation changes, by their names in ``quantization_exclude`` and architecture tables."""
ATTENTION_LAYOUTS = ("TND", "TND16", "BSH")
DEFAULT_MODEL_LEN = 8192
"""Upper limit of the default ``max_model_len``. At a model's full length, e.g. 131072 positions, the KV pages would
serve few sequences, and one long request would hold up all others."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The configuration of an engine.

    Raises:
        ParameterError: a value is not allowed, or two values do not go together; ``param`` names the field.
    """

    model: str | None = declare(
        None,
        AnyText(),
        "Hugging Face directory of a Dream or of a registered model, or its name on the hub, ORG/NAME or "
        "ORG/NAME@REVISION",
        group=Section.MODEL,
        metavar="MODEL",
        default_text="the bundled model",
    )
    lora: str | None = declare(
        None,
        AnyText(),
        "directory or name on the hub of a PEFT LoRA adapter, which is merged into the weights at start",
        group=Section.MODEL,
        flag="lora_path",
        metavar="ADAPTER",
    )
    device: str = declare("cpu", Choice(tuple(GRAPH_MODES_BY_DEVICE)), "what the model runs on", group=Section.MODEL)
    dtype: str = declare(
        "auto",
        Choice(WEIGHT_DTYPES),
        "number format of the weights; auto: the one that config.json names",
        group=Section.MODEL,
    )
    quantization: str | None = declare(
        None,
        Choice(tuple(QUANTIZATIONS)),
        "w8a8: linear layers of int8 weights (a scale for each output) and int8 activations (a scale for each "
        "token); w4a8, w4a8_g128: of int4 weights (a scale for each 32 or 128 inputs), on a cpu; fp8: of float8 e4m3 "
        "weights and activations, on a GPU of compute capability 8.9, 9.0 or 10.0, and slowly on a cpu; not with "
        "`graph_mode` inductor",
        group=Section.MODEL,
        default_text="as the checkpoint is stored",
    )
    quantization_exclude: tuple[str, ...] = declare(
        (),
        Choices(INT8_LAYERS),
        "linear layers that `quantization` leaves in the number format of the model, e.g. down_proj, where "
        "outliers are",
        group=Section.MODEL,
        default_text="none",
    )
    max_model_len: int | None = declare(
        None,
        Integer(1, INT64_MAX),
        "most tokens of prompt and answer together",
        group=Section.MODEL,
        default_text=f"the model's max_position_embeddings, but at most {DEFAULT_MODEL_LEN}",
    )
    kv_cache_memory: int | None = declare(
        None,
        Bytes(1),
        "size of the KV pages, in bytes or e.g. 512MiB",
        group=Section.ENGINE,
        default_text="what the other limits can use; at most 4GiB and half of the free memory, or on an NPU or a "
        "GPU four fifths of the memory that is free beside the weights and the scores of the largest graph",
    )
    gpu_memory_utilization: float | None = declare(
        None,
        Number(0.01, 1),
        "share of the whole memory of a GPU or an NPU up to which a rank may use it, weights included; not with "
        "`kv_cache_memory`",
        group=Section.ENGINE,
        metavar="SHARE",
        default_text="all that is free",
    )
    max_num_seqs: int = declare(
        32,
        Integer(1),
        "answers that are generated at the same time; a request has n for each prompt",
        group=Section.ENGINE,
    )
    max_num_batched_tokens: int | None = declare(
        None,
        Integer(1, INT64_MAX),
        "most tokens computed in one step; of a request whose branches alone have more, only some branches are",
        group=Section.ENGINE,
        default_text="`max_model_len`, but at least 4096",
    )
    max_num_branches: int = declare(
        15, Integer(0, 255), "most lookahead branches that a request may ask for", group=Section.ENGINE
    )
    enable_prefix_caching: bool = declare(
        True,
        Boolean(),
        "keep the KV pages of whole prompts for requests with an equal prompt; changes no token",
        group=Section.ENGINE,
    )
    seed: int | None = declare(
        None,
        Integer(0, INT64_MAX),
        "sampled requests that bring no seed of their own get one drawn from this one: the same requests in the "
        "same order get the same answers",
        group=Section.MODEL,
        default_text="a new one at every start",
    )
    threads: int | None = declare(
        None, Integer(1, 1024), "CPU threads of the engine", group=Section.MODEL, default_text="torch's choice"
    )
    tensor_parallel_size: int = declare(1, Integer(1, 4096), "ranks that split each forward pass", group=Section.RANKS)
    branch_parallel_size: int = declare(
        1,
        Integer(1, 4096),
        "groups of `tensor_parallel_size` ranks, each of which computes some of the branches",
        group=Section.RANKS,
    )
    distributed_timeout_seconds: float = declare(
        60.0,
        Number(2, 86400, unit="seconds"),
        "how long a rank may hang before the other ranks end",
        group=Section.RANKS,
        metavar="SECONDS",
    )
    check_answers: str | None = declare(
        None,
        AnyText(),
        "file of prompts with the tokens that a CPU answered (`python -m scripts.eval answers` writes it); an engine "
        "that answers otherwise does not start",
        group=Section.MODEL,
        metavar="FILE",
        default_text="nothing is compared",
    )
    profile_dir: str | None = declare(
        None,
        AnyText(),
        "folder for the traces that /start_profile and /stop_profile record",
        group=Section.ENGINE,
        metavar="DIR",
        default_text="nothing is recorded",
    )
    graph_mode: str = declare(
        DERIVED,
        Choice(GRAPH_MODES),
        "how decoding steps run: eager, or compiled (on an NPU by npugraph_ex or ge, on a GPU by cuda_graphs, on a CPU "
        "by inductor)",
        group=Section.GRAPHS,
        default_text="npugraph_ex on an NPU, cuda_graphs on a GPU, eager on a CPU",
    )
    graph_window_blocks: int = declare(
        8, Integer(2, 4096), "blocks of the largest window that a graph is compiled for", group=Section.GRAPHS
    )
    graph_cache: str | None = declare(
        None,
        AnyText(),
        "directory where compiled graphs are kept for the next start. The code in it runs then, so nobody else may "
        "be able to write to it",
        group=Section.GRAPHS,
        metavar="DIR",
        default_text="they are not kept",
    )
    attention_layout: str = declare(
        "TND",
        Choice(ATTENTION_LAYOUTS),
        "tensor layout of attention on an NPU; TND16 is TND with at most 16 queries an entry; "
        "`python -m scripts.selftest` says which one works and is faster; changes no token",
        group=Section.GRAPHS,
    )

    graph_params: GraphParams = GraphParams()
    """Follows from the decoding defaults; not a setting."""

    def __post_init__(self) -> None:
        check_settings(self)
        # Ranks compare their configurations, and a float is what arrives at a rank.
        object.__setattr__(self, "distributed_timeout_seconds", float(self.distributed_timeout_seconds))
        modes = GRAPH_MODES_BY_DEVICE[self.device]
        if self.graph_mode is None:
            object.__setattr__(self, "graph_mode", modes[0])
        if self.graph_mode not in modes:
            message = f"unknown value {self.graph_mode!r} for device {self.device}; choose one of {', '.join(modes)}"
            raise ParameterError("graph_mode", message)
        check_window_attention(self.graph_params.window_attention, self.branch_parallel_size, self.graph_mode)
        if self.gpu_memory_utilization is not None and self.kv_cache_memory is not None:
            raise ParameterError("gpu_memory_utilization", "does not go with kv_cache_memory; leave out one of them")
        if self.quantization_exclude and self.quantization is None:
            raise ParameterError("quantization_exclude", "needs quantization")
        if self.quantization is not None:
            self.check_int8("quantization", repr(self.quantization))
            if not self.quantized_layers():
                message = "names all linear layers, so nothing would be quantised; leave out at least one"
                raise ParameterError("quantization_exclude", message)

    def check_int8(self, param: str, value: str) -> None:
        """Raises ParameterError if the graph mode cannot run int8 linear layers, which ``param`` asks for."""
        if self.graph_mode not in INT8_GRAPH_MODES:
            modes = ", ".join(INT8_GRAPH_MODES)
            raise ParameterError(
                param, f"{value} runs with one of the graph modes {modes}; graph_mode is {self.graph_mode!r}"
            )

    def quantized_layers(self) -> frozenset[str]:
        """The members of INT8_LAYERS that this configuration quantises."""
        return frozenset() if self.quantization is None else frozenset(INT8_LAYERS) - {*self.quantization_exclude}

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale of int4 weights; 0 without quantisation to int4."""
        return 0 if self.quantization is None else QUANTIZATIONS[self.quantization][1]

    @property
    def codes(self) -> str | None:
        """Number format of quantised weights: "int8", "int4" or "fp8"; None without quantisation."""
        return None if self.quantization is None else QUANTIZATIONS[self.quantization][0]

    def check_split(self, model: ModelConfig) -> None:
        """Raises ParameterError if ``tensor_parallel_size`` ranks cannot split a model."""
        size, sizes = self.tensor_parallel_size, model.tensor_parallel_sizes()
        if size not in sizes:
            choices = ", ".join(map(str, sizes))
            message = f"{size} does not split this model evenly; choose one of {choices}"
            raise ParameterError("tensor_parallel_size", message)

    def longest_sequence(self, model: ModelConfig) -> int:
        """Positions of the longest sequence: ``max_model_len``, or its default for the model.

        Raises:
            ParameterError: the model has fewer positions.
        """
        limit = model.max_position_embeddings
        if self.max_model_len is not None and self.max_model_len > limit:
            message = f"must be from 1 to the model's {limit} positions, got {self.max_model_len}"
            raise ParameterError("max_model_len", message)
        return self.max_model_len or min(limit, DEFAULT_MODEL_LEN)

    def batched_tokens(self, max_model_len: int) -> int:
        """Most tokens that a rank computes in a step."""
        return self.max_num_batched_tokens or max(4096, max_model_len)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor_parallel_size * self.branch_parallel_size

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(settings(cls))


def check_window_attention(window_attention: str, branch_parallel_size: int, graph_mode: str) -> None:
    """Raises ParameterError for full attention in compiled steps of several branch-parallel groups."""
    if window_attention == "full" and branch_parallel_size > 1 and graph_mode != "eager":
        message = (
            f'"full" and branch_parallel_size {branch_parallel_size} do not go together in graph mode {graph_mode}; '
            'choose "block_causal", or graph mode eager, where steps run op by op'
        )
        raise ParameterError("window_attention", message)


def divided_length(length: int, max_queries: int | None) -> tuple[int, ...]:
    """Splits an entry of ``length`` queries into entries of at most ``max_queries``; None: no limit."""
    if max_queries is None or length <= max_queries:
        return (length,)
    count, rest = divmod(length, max_queries)
    return (max_queries,) * count + ((rest,) if rest else ())
