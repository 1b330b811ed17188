"""Operations of the parts of a block, and the values between them.

An operation says what it reads and writes, which parameters it has, and how tensor-parallel ranks share them. From that
follow parameters and shards (`spec.tensor_sharding`), and by one rule per kind of operation saved bytes, FLOPs, traffic
and temporary bytes (`cost.exact.derive`).

Symbols: D width of the residual stream, E experts, k of them per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from phalanx.spec.activations import XIELU_PARAMETERS

Shape = tuple[int, ...]
NF4_BLOCK = 64
"""Numbers of a row that share a scale (QLoRA, arXiv 2305.14314, section 3)."""
NF4_SCALE_BYTES = 4
NF4_BLOCK_BYTES = NF4_SCALE_BYTES + NF4_BLOCK // 2
"""Bytes of a block: its scale in fp32, and 4 bits for each number (`model.nf4`)."""
Tokens = Literal["residual", "all"]
"""Tokens that a rank has of a value. residual: those of its residual stream, with sequence parallelism a share. all:
those of the tensor-parallel ranks together."""
Init = Literal["normal", "output", "ones", "zeros", "taps", "log_rates", "step_bias", "fan_in", "row_norms"] | float
"""Distribution of initial weights, or the number that all are. output: normal, smaller by the number of layers,
because it is added to the stream. taps: normal, so that a convolution keeps the variance. log_rates: logarithms of
rates of decay, which are uniform. step_bias: that of a step by which a token changes a state (`model.init`). fan_in:
uniform, with bounds of 1 / sqrt(columns). row_norms: the norms of the rows of the matrix that is adapted."""


@dataclass(frozen=True)
class Cut:
    """How tensor-parallel ranks share a width: in units that are never divided, such as heads."""

    field: str
    """Field of the run file that has the number of units."""
    units: int
    unit: int = 1
    """Numbers of a unit."""
    copied_below: bool = False
    """True if neighbors have copies of a unit where there are more ranks than units."""
    share: Literal["units", "columns", "all"] = "units"
    """Units of a rank: its own; those of its columns, of which all ranks have equally many; or all units, of which it
    uses its own."""

    @property
    def width(self) -> int:
        """Numbers of all units."""
        return self.units * self.unit

    def is_shared_by(self, ranks: int, units: int | None = None) -> bool:
        """Return whether all of some ranks can have equally many units, of all units or of `units`."""
        units = units or self.units
        return units % ranks == 0 or (self.copied_below and ranks % units == 0)

    def replication(self, ranks: int) -> int:
        """Return the number of neighbors with the same units."""
        return max(1, ranks // self.units) if self.copied_below else 1

    def units_on_rank(self, ranks: int) -> int:
        """Return the maximum over ranks of their units."""
        if self.share == "all":
            return self.units
        if self.share == "columns":
            columns = self.width // ranks
            starts = range(0, self.width, columns)
            return max(-(-(start + columns) // self.unit) - start // self.unit for start in starts)
        return max(1, -(-self.units // ranks))

    def width_on_rank(self, ranks: int) -> int:
        """Return the maximum over ranks of their numbers."""
        return self.units_on_rank(ranks) * self.unit


@dataclass(frozen=True, eq=False)
class Value:
    """A tensor with some numbers for each token."""

    width: int
    cut: Cut | None = None
    """How tensor-parallel ranks share the width; None: each rank has all of it."""
    tokens: Tokens = "all"
    copies: int = 1
    """Copies of a token, one for each of its experts."""
    numbers: Literal["residual", "compute", "high"] = "compute"
    """Precision: that of the residual stream, of products, or of statistics."""
    view_of: Value | None = None
    """Larger value whose memory this one shares, and keeps alive."""
    is_given: bool = False
    """True if another layer, or the start of the model, has computed it and keeps it."""


@dataclass(frozen=True)
class Parameter:
    """A tensor that is trained, unless a run freezes it."""

    shape: Shape
    init: Init = "normal"
    cut: Cut | None = None
    """How ranks share its rows, if not as the heads of its kernel."""
    is_precise: bool = False
    """True if exports keep it in fp32."""
    is_frozen: bool = False
    """True if it is not trained."""
    is_quantized: bool = False
    """True if it is stored in blocks of 4 bits (`model.nf4`)."""

    @property
    def numbers(self) -> int:
        """Number of its elements."""
        return prod(self.shape)

    @property
    def stored_shape(self) -> Shape:
        """Shape of the tensor that has it: bytes, if it is quantized."""
        *rows, columns = self.shape
        return (*rows, columns // NF4_BLOCK * NF4_BLOCK_BYTES) if self.is_quantized else self.shape


@dataclass(frozen=True, eq=False, kw_only=True)
class Operation:
    """A step of a part."""

    name: str = ""
    """Module of the parameters, relative to the part; empty for the part itself."""
    reads: tuple[Value, ...]
    writes: Value
    parameters: dict[str, Parameter] = field(default_factory=dict)

    @property
    def named_parameters(self) -> dict[str, Parameter]:
        """Parameters by their names in the part."""
        prefix = f"{self.name}." if self.name else ""
        return {f"{prefix}{leaf}": parameter for leaf, parameter in self.parameters.items()}


@dataclass(frozen=True, eq=False, kw_only=True)
class Linear(Operation):
    """A product with a matrix: column-parallel if its output is cut, row-parallel if its input is, else copied."""

    is_precise: bool = False
    """True if it is not computed in float8: the choice of experts would change."""
    scale: float = 1.0
    """Factor of its output."""
    adapts: str = ""
    """Name of the product whose adapter it is a part of."""
    dropout: float = 0.0
    """Share of its inputs that training sets to zero."""

    @property
    def product_name(self) -> str:
        """Name of the product in the part."""
        return self.name

    @property
    def matrix(self) -> Parameter:
        """The matrix, or the stack of them."""
        return next(iter(self.parameters.values()))

    @property
    def bias(self) -> Parameter | None:
        """The bias, or the stack of them."""
        return next((each for name, each in self.parameters.items() if name.endswith("bias")), None)

    @property
    def is_trained(self) -> bool:
        """True if the matrix has a gradient."""
        return not self.matrix.is_frozen

    @property
    def role(self) -> Literal["column", "row", "copied"]:
        """Return how tensor-parallel ranks share the product (Megatron-LM, arXiv 1909.08053, section 3)."""
        if self.reads[0].cut:
            return "row"
        return "column" if self.writes.cut else "copied"


class GroupedLinear(Linear):
    """Products of the rows of all experts with one matrix each; expert-parallel ranks have some of the experts."""

    @property
    def product_name(self) -> str:
        """Name of the product in the part: several have one module."""
        leaf = next(iter(self.parameters))
        return f"{self.name}.{leaf}" if self.name else leaf


@dataclass(frozen=True, eq=False, kw_only=True)
class Magnitude(Operation):
    """The sum of a product and its adapter, divided by norms and times trained numbers (DoRA, arXiv 2402.09353, eq. 5).

    Each norm is that of a row of both matrices together."""

    adapts: str
    """Name of the product."""
    crosses_ranks: bool
    """True if each rank has some columns of the rows."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Norm(Operation):
    """A norm over vectors of a width, with or without a scale."""

    width: int
    """Numbers of a vector: a head, or all of them."""
    eps: float
    """Added to the variance or the mean square."""
    kind: Literal["rmsnorm", "layernorm", "head_layernorm"] = "rmsnorm"
    """head_layernorm: a layernorm by an rmsnorm of differences from the mean, with a scale of each head."""
    has_offset: bool = False
    """True if the scale is 1 + weight."""

    @property
    def crosses_ranks(self) -> bool:
        """True if the vector of a token is on several tensor-parallel ranks."""
        cut = self.reads[0].cut
        return cut is not None and cut.share == "units" and self.width > cut.unit


class Clip(Operation):
    """A value with limits. Its backward pass needs the value."""


class GatedNorm(Norm):
    """A norm of silu(gate) x, which it computes again in the backward pass. It reads x and the gate."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Activation(Operation):
    """An element-wise function, which the product that reads it computes again in the backward pass."""

    function: str
    """Name in `spec.activations`."""
    arguments: tuple[float, ...] = ()
    """Numbers in its formula."""


class LookUp(Operation):
    """Rows of an embedding."""


class LayerInputs(Operation):
    """The scaled sum of two values, which is kept: each layer reads a part of it."""


class Concatenate(Operation):
    """Values of a token as one."""


class Gate(Operation):
    """A value times the sigmoid of one number of each token."""


class GatherTokens(Operation):
    """Gather of the tokens of a value that all tensor-parallel ranks need, each for its own heads."""


class GatherHeads(Operation):
    """Gather of columns, so that each rank has all heads."""


@dataclass(frozen=True)
class ScanFlops:
    """FLOPs of the forward pass of a scan in each of some heads."""

    heads: Cut
    per_token: int = 0
    """FLOPs with the state."""
    per_pair: int = 0
    """FLOPs for a token and a token of its chunk, visible or not."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Core(Operation):
    """The kernel of a mixer, in which tokens see each other. Its heads are independent."""

    keeps: tuple[Value, ...]
    """Values that it saves as the kernel reads and writes them."""
    heads: Cut
    """Heads, or channels, of which tensor-parallel and Ulysses ranks have some."""
    flops: tuple[ScanFlops, ...] = ()
    """FLOPs besides those of attention."""
    backward_values: tuple[Value, ...] = ()
    """Values in its backward pass, if they are others than the gradients of what it reads and writes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionCore(Core):
    """Attention of queries to keys and values, which it reads. A head saves the log-sum-exp of each token."""

    flops_per_key: int
    """FLOPs of the forward pass for a query and a key that it sees."""
    window: int | None = None
    """Keys that a query sees at most, itself included; None: all earlier ones."""
    chunk: int | None = None
    """Tokens of a document that see each other only; None: all of it."""

    @property
    def padding(self) -> int:
        """Numbers by which the kernel's output exceeds what it writes, because it pads values."""
        return self.keeps[-1].width - self.writes.width


@dataclass(frozen=True, eq=False, kw_only=True)
class ScanCore(Core):
    """A recurrence with a state, in chunks of tokens (`spec.parts.scan_segments`). States before segments are saved."""

    state: Value
    """Numbers of a state, which a row has once."""
    segment_values: tuple[Value, ...]
    """Values of a segment's tokens in its backward pass, besides the gradients of what it reads and writes."""
    chunk_values: tuple[Value, ...]
    """Values of a chunk's tokens in it."""
    pair_values: int
    """Numbers for a head and a pair of a chunk's tokens in it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Route(Operation):
    """The choice of experts from logits, with the losses for balance."""

    num_experts: int
    top_k: int
    score: Literal["softmax", "sigmoid"]
    normalizes: bool
    balances_sequences: bool
    """True if the balance is measured per sequence, not per micro-batch."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Dispatch(Operation):
    """Copies of tokens for their experts, in the order of the experts."""

    num_experts: int
    weighs: bool = False
    """True if the copies are multiplied by the weights of their experts, not what these return."""


class Combine(Operation):
    """The weighted sum of the outputs of a token's experts."""


@dataclass(frozen=True, eq=False)
class Part:
    """A list of operations on the normalized input of a residual branch. Methods append to it."""

    name: str
    """Module in the block."""
    kind: Literal["attention", "mlp", "experts", "merge", "inputs"]
    """attention: any mixer of tokens. merge: the input of a layer for multi-token prediction. inputs: what all layers
    read besides the residual stream."""
    input: Value
    operations: list[Operation] = field(default_factory=list)
    carried: dict[str, Parameter] = field(default_factory=dict)
    """Tensors that are loaded and saved with the model, without use in training, by their names in the part."""

    def linear(
        self,
        name: str,
        x: Value,
        cut: Cut | None = None,
        *,
        width: int = 0,
        bias: bool = False,
        init: Init = "normal",
        is_precise: bool = False,
        scale: float = 1.0,
    ) -> Value:
        """Append a product and return its output, which is cut, or has a width: by default that of the input."""
        width = cut.width if cut else width or self.input.width
        parameters = {"weight": Parameter((width, x.width), init)}
        if bias:
            parameters["bias"] = Parameter((width,), "zeros")
        tokens: Tokens = "all" if cut else "residual" if x.cut else x.tokens
        y = Value(width, cut, tokens)
        return self.add(
            Linear(name=name, reads=(x,), writes=y, parameters=parameters, is_precise=is_precise, scale=scale)
        )

    def grouped(
        self,
        leaf: str,
        x: Value,
        experts: int,
        width: int,
        cut: Cut | None,
        *,
        bias: bool = False,
        init: Init = "normal",
    ) -> Value:
        """Append the products of rows with the matrices of their experts; return their output."""
        parameters = {leaf: Parameter((experts, width, x.width), init)}
        if bias:
            parameters[f"{leaf}_bias"] = Parameter((experts, width), "zeros")
        y = replace(x, width=width, cut=cut)
        return self.add(GroupedLinear(name="experts", reads=(x,), writes=y, parameters=parameters))

    def head_norm(self, name: str, x: Value, width: int, eps: float) -> Value:
        """Append a layernorm of each head, of a width, with a weight for each; return its output."""
        weight = {"weight": Parameter((x.width // width, width), "ones")}
        norm = Norm(
            name=name,
            reads=(x,),
            writes=replace(x),
            parameters=weight,
            width=width,
            eps=eps,
            kind="head_layernorm",
        )
        return self.add(norm)

    def norm(
        self, name: str, x: Value, width: int, eps: float, has_offset: bool = False, has_weight: bool = True
    ) -> Value:
        """Append an RMSNorm over vectors of a width; return its output."""
        norm = Norm(
            name=name,
            reads=(x,),
            writes=replace(x),
            parameters={"weight": Parameter((width,), "zeros" if has_offset else "ones")} if has_weight else {},
            width=width,
            eps=eps,
            has_offset=has_offset,
        )
        return self.add(norm)

    def activate(self, function: str | tuple[str, tuple[float, ...]], *xs: Value) -> Value:
        """Append an activation, perhaps with the numbers in its formula; return its output, like the last value."""
        name, arguments = (function, ()) if isinstance(function, str) else function
        activation = Activation(
            reads=xs,
            writes=replace(xs[-1], view_of=None, is_given=False),
            function=name,
            arguments=arguments,
            parameters={key: Parameter((1,), init) for key, init in XIELU_PARAMETERS.items()}
            if name == "xielu"
            else {},
        )
        return self.add(activation)

    def gate_heads(self, function: str, x: Value, out: Value, heads: Cut) -> Value:
        """Append a gate of each head of a kernel's output, a product of `x`; return the gated output."""
        # Few columns, which float8 does not divide.
        return self.activate(function, self.linear("wg", x, replace(heads, unit=1), is_precise=True), out)

    def add(self, operation: Operation) -> Value:
        """Append an operation; return what it writes."""
        self.operations.append(operation)
        return operation.writes

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Parameters by their names in the part, in the order of its module's."""
        return {name: each for operation in self.modules for name, each in operation.named_parameters.items()}

    @property
    def modules(self) -> list[Operation]:
        """Operations in the order of their modules: the part itself, products, norms, modules of several products.

        Those of such a module follow one another in the same order. Saved state depends on it."""
        modules = [each.name.partition(".")[0] for each in self.operations]
        inner = {each.name.partition(".")[0] for each in self.operations if "." in each.name}
        inner |= {each.name for each in self.operations if isinstance(each, GroupedLinear)}

        def place(each: Operation) -> tuple[bool, int, int, bool]:
            module = each.name.partition(".")[0]
            is_inner = module in inner
            return (
                each.name != "",
                modules.index(module) if is_inner else -1,
                each.name.count("."),
                isinstance(each, Norm),
            )

        return sorted(self.operations, key=place)

    def within(self, module: str) -> Part:
        """Return the operations of a module of the part, as a part of their own."""
        inner = Part(module, self.kind, self.input)
        for operation in self.operations:
            prefix, _, name = operation.name.rpartition(".")
            if module in (operation.name, prefix):
                operation = replace(operation, name=name if prefix else "")
                if isinstance(operation, Linear | Magnitude) and operation.adapts:
                    operation = replace(operation, adapts=operation.adapts.removeprefix(f"{module}."))
                inner.operations.append(operation)
            elif isinstance(operation, Activation) and operation.reads[0] in [each.writes for each in inner.operations]:
                inner.operations.append(operation)
        return inner

    def outside_modules(self) -> Part:
        """Return the operations that are not of a module of the part, as a part of their own."""
        modules = {operation.name.partition(".")[0] for operation in self.operations if "." in operation.name}
        modules |= {each.name for each in self.operations if isinstance(each, GroupedLinear)}
        operations = [operation for operation in self.operations if operation.name.partition(".")[0] not in modules]
        return Part(self.name, self.kind, self.input, operations)

    @property
    def linears(self) -> list[Linear]:
        """The products."""
        return [operation for operation in self.operations if isinstance(operation, Linear)]

    @property
    def adapters(self) -> dict[str, tuple[Linear, Linear]]:
        """The products A and B of each adapter, by the name of the product that it adapts."""
        adapters: dict[str, tuple[Linear, ...]] = {}
        for linear in self.linears:
            if linear.adapts:
                adapters[linear.adapts] = (*adapters.get(linear.adapts, ()), linear)
        return {name: (a, b) for name, (a, b) in adapters.items()}

    @property
    def magnitudes(self) -> dict[str, Magnitude]:
        """The magnitudes of adapted products, by the names of these."""
        return {each.adapts: each for each in self.operations if isinstance(each, Magnitude)}

    def input_products(self) -> list[str]:
        """Return the names of the products that read the input of the part, without those of adapters."""
        return [linear.name for linear in self.linears if linear.reads == (self.input,) and not linear.adapts]

    @property
    def cuts(self) -> list[Cut]:
        """How tensor-parallel ranks share the widths of what operations write, each once."""
        cuts = [operation.writes.cut for operation in self.operations]
        return list(dict.fromkeys(cut for cut in cuts if cut is not None and cut.share == "units"))

    @property
    def cores(self) -> list[Core]:
        """The kernels in which tokens see each other: none, or one."""
        return [operation for operation in self.operations if isinstance(operation, Core)]

    @property
    def attention_cores(self) -> list[AttentionCore]:
        """The kernel of attention, if the part has one."""
        return [core for core in self.cores if isinstance(core, AttentionCore)]

    @property
    def activation(self) -> Activation:
        """The only activation."""
        (activation,) = (operation for operation in self.operations if isinstance(operation, Activation))
        return activation

    @property
    def reads_input(self) -> bool:
        """True if a product reads the input of the part."""
        return any(linear.reads == (self.input,) for linear in self.linears)

    def saved_inputs(self, linear: Linear) -> tuple[Value, ...]:
        """Return what a product saves as its input: the inputs of an activation, which is computed again."""
        (x,) = linear.reads
        writer = self.writer(x)
        return writer.reads if isinstance(writer, Activation) else (x,)

    def first_reader(self, value: Value) -> Linear:
        """Return the first column-parallel product that reads a value."""
        return next(linear for linear in self.linears if linear.role == "column" and linear.reads == (value,))

    def writer(self, value: Value) -> Operation | None:
        """Return the operation that writes a value; None for the input of the part."""
        return next((operation for operation in self.operations if operation.writes is value), None)
