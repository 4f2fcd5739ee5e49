"""Translate the PTX of kernels to C++ that the emulation runs: ptx_to_cpp.py FOLDER NAME.ptx...

A kernel becomes a function of its mangled name, a register a variable, an instruction a statement
as the PTX ISA defines it: arithmetic here, whatever takes part in the emulation in ptx_isa.h. An
unknown instruction ends the translation.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

TYPES = {"pred": "bool", "f16": "uint16_t", "f32": "float", "f64": "double"}
for bits in (8, 16, 32, 64):
    TYPES |= {f"{kind}{bits}": f"uint{bits}_t" for kind in "bu"} | {f"s{bits}": f"int{bits}_t"}
DTYPES = {"f16": "DType::kFloat16", "bf16": "DType::kBFloat16"}
# Of a register by the letters of its name.
REGISTERS = {"p": "pred", "rs": "b16", "r": "b32", "rd": "b64", "f": "f32", "fd": "f64"}
SPECIAL = {"tid": "threadIdx", "ctaid": "blockIdx", "ntid": "blockDim", "nctaid": "gridDim"}

# Of the source operands, in the instruction's type; integers of the first ones without sign, since
# they wrap around.
UNSIGNED = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "mul.lo": "{0} * {1}",
    "mad.lo": "{0} * {1} + {2}",
    "fma.rn": "std::fma({0}, {1}, {2})",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "xor": "{0} ^ {1}",
    "not": "~{0}",
    "neg": "-{0}",
    "shl": "shift_left({0}, {1})",
    "selp": "{2} ? {0} : {1}",
    "mov": "{0}",
    "cvta.to.global": "{0}",
    "popc": "std::popcount({0})",
}
SIGNED = {
    "shr": "shift_right({0}, {1})",
    "min": "minimum({0}, {1})",
    "max": "maximum({0}, {1})",
    "div": "divide({0}, {1})",
    "div.rn": "{0} / {1}",
    "rem": "remainder({0}, {1})",
    "mul.hi": "(int64_t){0} * {1} >> 32",
    "mul.wide": "widen({0}) * widen({1})",
    "abs": "std::fabs({0})",
    # The sign of the first operand, the rest of the second.
    "copysign": "std::copysign({1}, {0})",
    "rcp.rn": "1 / {0}",
    "rcp.approx.ftz": "ptx::flush(1 / ptx::flush({0}))",
    "ex2.approx": "std::exp2({0})",
    "ex2.approx.ftz": "ptx::exp2({0})",
}
COMPARISONS = {
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    # True where an operand is NaN.
    "neu": "!({0} == {1})",
    "leu": "!({0} > {1})",
    "geu": "!({0} < {1})",
    "nan": "std::isnan({0}) || std::isnan({1})",
}
# Operands that are not of the instruction's type.
OTHER_TYPES = {("shl", 1): "u32", ("shr", 1): "u32", ("selp", 2): "pred"}

# Functions of ptx_isa.h with the operands in their order.
CALLS = {
    "bar.sync": "bar_sync",
    "bar.arrive": "bar_arrive",
    "bar.warp.sync": "__syncwarp",
    "cp.async.cg.shared.global.L2::128B": "cp_async",
    "cp.async.commit_group": "cp_async_commit",
    "cp.async.wait_group": "cp_async_wait",
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64": "cp_async_mbarrier_arrive",
    "mbarrier.init.shared::cta.b64": "mbarrier_init",
    "mbarrier.arrive.shared::cta.b64": "mbarrier_arrive",
    "fence.proxy.async.shared::cta": "fence_proxy_async",
}
# The first operand is what they return, of this type.
FUNCTIONS = {
    "mbarrier.try_wait.parity.shared::cta.b64": ("mbarrier_try_wait", "pred", ("u32", "u32")),
    "redux.sync.add.u32": ("reduce_add", "b32", ("b32", "b32")),
    "vote.sync.any.pred": ("0 != ballot", "pred", ("pred", "b32")),
    "vote.sync.ballot.b32": ("ballot", "b32", ("pred", "b32")),
}
NOTHING = (
    # Launches follow one another, and a thread has all the registers that it wants.
    "griddepcontrol.wait",
    "griddepcontrol.launch_dependents",
    "setmaxnreg.inc.sync.aligned.u32",
    "setmaxnreg.dec.sync.aligned.u32",
    # Products are there when they are issued.
    "wgmma.fence.sync.aligned",
    "wgmma.commit_group.sync.aligned",
    "wgmma.wait_group.sync.aligned",
)

MEMORY = re.compile(r"(ld|st)(?:\.param|\.global|(\.shared))?(?:\.v([24]))?\.(\w+)")
LDMATRIX = re.compile(r"ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared\.b16")
MMA = re.compile(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(b?f16)\.\1\.f32")
WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(64|128)k16\.f32\.(b?f16)\.\2")
SHUFFLE = re.compile(r"shfl\.sync\.(up|bfly|idx)\.b32")

PARAMETERS = re.compile(r"\.param \.align 8 \.b8 (\w+)_param_0\[(\d+)\]")
REGISTER = re.compile(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>;")
INSTRUCTION = re.compile(r"(?:@(!?)%(p\d+) )?\s*([a-z][\w.:]*)\s*(.*);")


def split(operands: str) -> list[str]:
    """Split at the commas outside brackets."""
    return [x.strip() for x in re.findall(r"(?:[^,\[{]|\[[^]]*\]|\{[^}]*\})+", operands)]


def vector(operand: str) -> list[str]:
    """Return the registers of a vector, or the only one."""
    return split(operand.strip("{}"))


def register_kind(name: str) -> str:
    """Return the type that a register was declared with; asm statements declare predicates p."""
    return REGISTERS[name.strip("%0123456789")]


def cast(expression: str, kind: str, to: str) -> str:
    """Return an expression of one type as another: integers change their size, floats nothing."""
    if TYPES[kind] == TYPES[to]:
        return expression
    if "f" not in kind + to:
        return f"({TYPES[to]})({expression})"
    return f"std::bit_cast<{TYPES[to]}>({expression})"


def value(operand: str, kind: str) -> str:
    """Return a source operand in a type of PTX."""
    if operand[0] == "[":
        name, _, offset = operand.strip("[]").partition("+")
        width = "b64" if "%rd" in name or "_param_" in name else "b32"
        return f"{value(name, width)} + {offset or 0}"
    if match := re.fullmatch(r"%(n?(?:cta|t)id)\.([xyz])", operand):
        return f"{SPECIAL[match[1]]}.{match[2]}"
    if operand[0] == "%" or operand == "p":
        return cast(operand.strip("%"), register_kind(operand), kind)
    if match := re.fullmatch(r"0([fd])([0-9A-F]+)", operand):
        return f"std::bit_cast<{TYPES[kind]}>(0x{match[2]}{'U' if match[1] == 'f' else 'UL'})"
    if re.fullmatch(r"-?\d+", operand):
        return f"({TYPES[kind]}){operand}"
    return "address_of(&parameters)" if "_param_" in operand else "shared_begin()"


def put(register: str, kind: str, expression: str) -> str:
    """Assign an expression of a type to a register."""
    return f"{register.strip('%')} = {cast(expression, kind, register_kind(register))};"


def array(name: str, kind: str, operand: str) -> str:
    """Declare an array with the values of a vector."""
    return f"{TYPES[kind]} {name}[] = {{{', '.join(value(x, kind) for x in vector(operand))}}};"


def take(operand: str, kind: str, name: str) -> str:
    """Assign an array to the registers of a vector."""
    return " ".join(put(x, kind, f"{name}[{i}]") for i, x in enumerate(vector(operand)))


def memory(match: re.Match[str], operands: list[str]) -> str:
    """Return a load or a store."""
    to, source = operands
    load, shared, count, kind = match[1] == "ld", match[2], match[3] or 1, match[4]
    at = f"{'shared_' if shared else ''}memory<{TYPES[kind]}, {count}>"
    m = f"auto* m = {at}({value(source if load else to, 'b64')}, site);"
    if load:
        return f"{{ {m} {take(to, kind, 'm')} }}"
    stores = (f"m[{i}] = {value(x, kind)};" for i, x in enumerate(vector(source)))
    return f"{{ {m} {' '.join(stores)} }}"


def wgmma(match: re.Match[str], operands: list[str]) -> str:
    """Return a product of a warpgroup: c, a, b, whether c is added, signs of a and b, majors."""
    c, a, b, add, sign_a, sign_b, *by_rows = operands
    columns, dtype = match.groups()
    if (sign_a, sign_b) != ("1", "1") or by_rows[:-1] not in ([], ["0"]):
        raise ValueError(f"not emulated: wgmma with {operands[3:]}")
    arrays, of_a = array("c", "f32", c), f"{value(a, 'b64')}, nullptr"
    if a[0] == "{":
        arrays, of_a = f"{arrays} {array('a', 'b32', a)}", "0, a"
    major = "Major::kRows" if by_rows[-1] == "1" else "Major::kColumns"
    product = f"{{{DTYPES[dtype]}, {columns}, {of_a}, {value(b, 'b64')}, {major}}}"
    return f"{{ {arrays} wgmma({product}, c, {value(add, 'pred')}, site); {take(c, 'f32', 'c')} }}"


def convert(opcode: str, operands: list[str]) -> str:
    """Return a conversion; to floats it rounds to nearest even."""
    target, *sources = operands
    _, *rounding, to, kind = opcode.split(".")
    values = [value(x, kind) for x in sources]
    if rounding not in ([], ["rn"], ["rzi"]):
        raise ValueError(f"not emulated: {opcode}")
    if to.endswith("f16x2"):
        # The first source is the upper half.
        return put(target, "b32", f"ptx::pack_pair<{DTYPES[to[:-2]]}>({values[1]}, {values[0]})")
    if to in DTYPES:
        return put(target, "b16", f"ptx::from_float<{DTYPES[to]}>({values[0]})")
    if kind in DTYPES:
        return put(target, "f32", f"ptx::to_float<{DTYPES[kind]}>({values[0]})")
    return put(target, to, f"convert<{TYPES[to]}>({values[0]})")


def move(target: str, source: str) -> str:
    """Return a move of two registers of 32 bits, the lower half first, to one of 64, or back."""
    if target[0] == "{":
        low, high = vector(target)
        whole = value(source, "b64")
        high = put(high, "b32", f"(uint32_t)({whole} >> 32)")
        return f"{{ {put(low, 'b32', f'(uint32_t){whole}')} {high} }}"
    low, high = (value(x, "b32") for x in vector(source))
    return put(target, "b64", f"(uint64_t{{{high}}} << 32 | {low})")


def arithmetic(opcode: str, operands: list[str]) -> str:
    """Return what takes values to a value."""
    base, kind = opcode.rsplit(".", 1)
    target, *sources = operands
    result = kind
    if base.startswith("setp."):
        expression, result = COMPARISONS[base[5:]], "pred"
    elif base in UNSIGNED:
        expression, kind = UNSIGNED[base], kind.replace("s", "u")
        result = kind
    else:
        expression = SIGNED[base]
    if base == "mul.wide":
        result = f"{kind[0]}64"
    elif opcode == "not.pred":
        expression = "!{0}"
    values = [value(x, OTHER_TYPES.get((base, i), kind)) for i, x in enumerate(sources)]
    return put(target, result, f"{expression.format(*values)}")


def statement(opcode: str, operands: list[str]) -> str:
    """Return one instruction in C++."""
    if opcode in NOTHING:
        return ";"
    if opcode in ("bra", "bra.uni"):
        return f"goto {operands[0][1:]};"
    if opcode == "ret":
        return "return;"
    if opcode in CALLS:
        values = [value(x, "b32") for x in operands if x != "_"]
        return f"{CALLS[opcode]}({', '.join([*values, 'site'])});"
    if opcode in FUNCTIONS:
        function, kind, kinds = FUNCTIONS[opcode]
        values = [value(x, of) for x, of in zip(operands[1:], kinds, strict=True)]
        return put(operands[0], kind, f"{function}({', '.join(values)}, site)")
    if match := MEMORY.fullmatch(opcode):
        return memory(match, operands)
    if match := LDMATRIX.fullmatch(opcode):
        load = f"ldmatrix_x4{'_transposed' if match[1] else ''}"
        row = f"shared_memory<uint16_t, 8>({value(operands[1], 'b32')}, site)"
        return f"{{ uint32_t x[4]; ptx::{load}(x, {row}, site); {take(operands[0], 'b32', 'x')} }}"
    if match := MMA.fullmatch(opcode):
        d, a, b, c = operands
        arrays = f"{array('a', 'b32', a)} {array('b', 'b32', b)} {array('c', 'f32', c)}"
        product = f"ptx::mma_m16n8k16<{DTYPES[match[1]]}>(c, a, b[0], b[1], site);"
        return f"{{ {arrays} {product} {take(d, 'f32', 'c')} }}"
    if match := WGMMA.fullmatch(opcode):
        return wgmma(match, operands)
    if match := SHUFFLE.fullmatch(opcode):
        results = [x.strip("%") for x in operands[0].split("|")]
        values = [value(x, "b32") for x in operands[1:]]
        return f"shuffle<Shuffle::{match[1]}>({', '.join([*results, *values])}, site);"
    if opcode.startswith("cvt."):
        return convert(opcode, operands)
    if opcode == "mov.b64" and "{" in operands[0] + operands[1]:
        return move(*operands)
    return arithmetic(opcode, operands)


def translate(ptx: str, file: str) -> Iterator[str]:
    """Yield the lines of C++."""
    yield '#include "cuda_emulation/ptx_isa.h"'
    inside = False
    for number, text in enumerate(ptx.splitlines(), 1):
        line = text.split("//")[0].strip()
        if match := PARAMETERS.fullmatch(line):
            yield f'extern "C" void {match[1]}(const Bytes<{match[2]}> parameters)'
        elif match := REGISTER.fullmatch(line):
            names = (f"{match[2]}{i}" for i in range(int(match[3])))
            yield f"{TYPES[match[1]]} {', '.join(names)};"
        elif line == ".reg .pred p;":
            yield "bool p;"
        elif line in ("{", "}"):
            inside = True
            yield line
        elif match := re.fullmatch(r"\$(\w+):", line):
            yield f"{match[1]}:;"
        elif inside and (match := INSTRUCTION.fullmatch(line)):
            code = statement(match[3], split(match[4]))
            code = code.replace("site)", f'Site{{"{file}", {number}}})')
            yield f"if ({match[1]}{match[2]}) {code}" if match[2] else code
        elif inside and line and line[0] not in ".)":
            raise ValueError(f"{file}:{number}: {line}")


if __name__ == "__main__":
    folder, *sources = map(Path, sys.argv[1:])
    for source in sources:
        name = source.name.split(".")[0]
        code = "\n".join(translate(source.read_text(encoding="utf-8"), f"{name}.ptx"))
        (folder / f"{name}.cpp").write_text(f"{code}\n", encoding="utf-8")
