"""The control flow of a kernel's machine code, and the registers of products that are under way."""

import re
from collections.abc import Iterator

LINE = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z]\S*)\s*(.*?)\s*;")
REGISTER = re.compile(r"\bR(\d+)\b")
PRODUCT = re.compile(r"HGMMA\.\d+x(\d+)x")
TARGET = re.compile(r"(.*)\b0x([0-9a-f]+)")
# Added to the number of a register that a product under way reads, not writes.
READ = 256


def span(operand: str, count: int) -> set[int]:
    """Return so many registers from the one that an operand names, if it names one."""
    found = REGISTER.match(operand)
    return set(range(int(found[1]), int(found[1]) + count)) if found else set()


class MachineCode:
    """The instructions of one kernel, as `cuobjdump --dump-sass` prints them."""

    def __init__(self, text: str) -> None:
        found = LINE.findall(text)
        self.operations = [operation for _, _, operation, _ in found]
        self.operands = [operands for *_, operands in found]
        places = {int(address, 16): i for i, (address, *_) in enumerate(found)}
        self.next: list[list[int]] = []
        for i, (_, predicate, operation, operands) in enumerate(found):
            target = TARGET.match(operands) if operation == "BRA" else None
            # A branch may have a second predicate, before its target.
            always = not predicate and (target is None or not target[1])
            ends = operation in ("BRA", "EXIT", "RET") and always
            self.next.append([] if ends or i + 1 == len(found) else [i + 1])
            if target:
                self.next[i].append(places[int(target[2], 16)])

    def operands_of(self, operation: str) -> str:
        """Return the operands of instructions whose names begin so."""
        pairs = zip(self.operations, self.operands, strict=True)
        return "; ".join(operands for name, operands in pairs if name.startswith(operation))

    def reached(self, operation: str) -> set[int]:
        """Return the instructions that may run after those whose names begin so."""
        waiting = [i for i, name in enumerate(self.operations) if name.startswith(operation)]
        seen = set(waiting)
        while waiting:
            new = [j for j in self.next[waiting.pop()] if j not in seen]
            seen.update(new)
            waiting += new
        return seen

    def registers(self, i: int) -> set[int]:
        """Return the registers that an instruction names, and those after them that it takes."""
        wide = {".128": 4, ".64": 2, "WIDE": 2}
        count = max((n for name, n in wide.items() if name in self.operations[i]), default=1)
        found = set()
        for named in REGISTER.finditer(self.operands[i]):
            before, after = self.operands[i][: named.start()], self.operands[i][named.end() :]
            # An address has one register, or a pair named R2.64.
            in_address = before.count("[") > before.count("]")
            more = 1 + after.startswith(".64") if in_address else count
            found |= set(range(int(named[1]), int(named[1]) + more))
        return found

    def states(self) -> Iterator[tuple[int, frozenset[int]]]:
        """Go through instructions, with the registers of asynchronous products under way there.

        Products are committed in groups; a wait leaves so many of the last groups under way. An
        instruction comes once for each set of groups that some path to it leaves.
        """
        waiting: list[tuple[int, tuple[frozenset[int], ...]]] = [(0, (frozenset(),))]
        seen = set(waiting)
        while waiting:
            i, groups = waiting.pop()  # the last group is not committed
            operation, operands = self.operations[i], self.operands[i]
            yield i, frozenset().union(*groups)
            if product := PRODUCT.match(operation):
                sums, factors = self.of_product(i, int(product[1]))
                groups = (*groups[:-1], groups[-1] | sums | {n + READ for n in factors})
                if "gsb0" in operands:
                    groups = (*groups, frozenset())
            elif operation.startswith("WARPGROUP.DEPBAR"):
                left = int(operands.rpartition("0x")[2])
                groups = (*groups[:-1][max(0, len(groups) - 1 - left) :], groups[-1])
            for j in self.next[i]:
                # Without a wait in a loop there would be no end of groups.
                if (state := (j, groups[-4:])) not in seen:
                    seen.add(state)
                    waiting.append(state)

    def of_product(self, i: int, columns: int) -> tuple[set[int], set[int]]:
        """Return the registers of the sums and of the factors of a product."""
        sums, factors, *_ = self.operands[i].split(", ")
        return span(sums, columns // 2), span(factors, 4)

    def touched_in_flight(self) -> Iterator[str]:
        """Go through instructions that touch a register of a product under way.

        Products that add to the same sums may follow each other: the hardware keeps their order.
        """
        for i, busy in self.states():
            if product := PRODUCT.match(self.operations[i]):
                sums, factors = self.of_product(i, int(product[1]))
                touched = factors & busy or {number + READ for number in sums} & busy
            else:
                touched = self.registers(i) & {number % READ for number in busy}
            if touched:
                yield f"{self.operations[i]} {self.operands[i]}"

    def overlapped(self, operation: str) -> int:
        """Count such instructions that have products under way on every path."""
        found: dict[int, bool] = {}
        for i, busy in self.states():
            if self.operations[i].startswith(operation):
                found[i] = found.get(i, True) and bool(busy)
        return sum(found.values())
