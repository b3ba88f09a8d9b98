"""The simulator once more without anything kept from plan to plan: one pass over whole programs, kernels compared with
all kernels. Slow and short; what ``recompile.timeline`` gives must equal it in every figure.
"""

from dataclasses import replace

from recompile.asks import SPREADS, WANTS_STORED, asked
from recompile.cpu_fusion import CpuFusion
from recompile.dataflow import tangents_of
from recompile.fusion import (
    LEAST_SHARED_BYTES,
    LONGEST_DISTANCE,
    MOST_OPS_FUSED,
    REUSE_WEIGHT,
    shapes_fuse,
)
from recompile.inlining import (
    LEAST_READS_STORED_AHEAD,
    MAX_OPS_INLINED,
    MAX_OPS_WHEN_REUSED,
    MAX_READS_WHEN_REUSED,
    StoredOp,
)
from recompile.joint import Kind, Side
from recompile.kernels import in_order, kernel_of, not_in_rows, reduced_inside, spilled_buffers
from recompile.moves import moves_of
from recompile.timeline import is_read_in_place


def ancestors(flow, roots, done=()):
    """Roots and what they are computed from, ascending, without inputs and what is done."""
    found, pending = set(), list(roots)
    while pending:
        i = pending.pop()
        if i not in found and i not in done and not flow.is_input[i]:
            found.add(i)
            pending.extend(flow.inputs[i])
    return sorted(found)


def orders(flow, saved):
    """The programs of forward and of backward."""
    forward = ancestors(flow, [*(i for i, side in enumerate(flow.side) if side is Side.FORWARD), *saved])
    backward, done = [], set(saved)
    roots = [i for i, side in enumerate(flow.side) if side is Side.BACKWARD]
    for root in (*roots, *flow.bwd_outputs):
        missing = ancestors(flow, [root], done)
        backward += missing
        done.update(missing)
    return forward, backward


def stored_ops(facts, program, kept, at_hand):
    flow, stored, inlined, copied, at_end = facts.flow, [], {}, {}, []
    ops, runs = [i for i in program if flow.is_op[i]], set(program)
    copies = {c.op: c for c in facts.view_copies if c.view in runs and c.products & runs}
    for i in ops:
        known = {b: op for b, op in inlined.items() if b not in copied or i not in copied[b].read_through}
        if flow.kind[i] not in (Kind.POINTWISE, Kind.REDUCTION):
            known = {b: op for b, op in known.items() if not asked(flow, i, b) & WANTS_STORED}
        sources = [known[b] for b in flow.reads[i] if b in known]
        reads = frozenset(b for b in flow.reads[i] if b not in known).union(*(s.reads for s in sources))
        members = frozenset([i]).union(*(s.members for s in sources))
        makes = tuple(b for b in flow.makes[i] if b not in at_hand)
        is_extern = flow.kind[i] not in (Kind.POINTWISE, Kind.REDUCTION)
        is_reduction = flow.kind[i] is Kind.REDUCTION
        op = StoredOp(i, reads, makes, members, 0, facts.shape[i], 0, is_extern, is_reduction, False, False)
        walks, ends = facts.walked(i, tuple(map(known.get, flow.reads[i]))) if facts.loops_run_together else ((), ())
        op = replace(op, walks=walks, ends=frozenset(ends))
        users = [u for u in ops for b in makes[:1] if b in flow.reads[u]]
        num_users = sum(makes[:1] in [(flow.buffer[a],) for a in flow.inputs[u]] for u in ops)  # who wants sizes is one
        asks = {bit for u in users for bit in (WANTS_STORED, SPREADS) if asked(flow, u, makes[0]) & bit}
        is_copied = i in copies and len(runs.intersection(copies[i].readers)) > 1 and makes and makes[0] not in kept
        is_heavy = len(reads) > MAX_READS_WHEN_REUSED or len(members) > MAX_OPS_WHEN_REUSED
        is_dear = len(members) > MAX_OPS_INLINED or (num_users > 1 and (is_heavy or members & facts.dear))
        is_dear = is_dear or (SPREADS in asks and members & facts.dear)
        is_computed = flow.kind[i] is Kind.POINTWISE and len(makes) == 1 and i not in facts.always_stored
        if is_computed and not reads:
            inlined[makes[0]] = op
            if WANTS_STORED in asks:
                stored.append(op)
            elif makes[0] in kept:
                at_end.append(op)
        elif (
            flow.kind[i] is not Kind.POINTWISE
            or len(makes) != 1
            or i in facts.always_stored
            or makes[0] in kept
            or WANTS_STORED in asks
            or is_dear
        ):
            stored.append(op)
            if is_copied and not is_dear and sum(flow.numel[b] > 1 for b in reads) < LEAST_READS_STORED_AHEAD:
                inlined[makes[0]], copied[makes[0]] = op, copies[i]
        else:
            inlined[makes[0]] = op
    return stored + at_end


class Kernels:
    """Kernels under construction as lists of (position, op), by the number in which they were begun."""

    def __init__(self, size, stored):
        self.size, self.kernels = size, {}
        self.single = {b for op in stored for b in op.makes if sum(b in other.reads for other in stored) == 1}

    def makes(self, k):
        return {b for _, op in self.kernels[k] for b in op.makes}

    def reads(self, k):
        return {b for _, op in self.kernels[k] for b in op.reads}

    def sources_of(self, reads):
        return {k for k in self.kernels if reads & self.makes(k)}

    def sources(self, k):
        return self.sources_of(self.reads(k)) - {k}

    def before(self, k):
        """All kernels that must run before one."""
        found, pending = set(), [k]
        while pending:
            for source in self.sources(pending.pop()) - found:
                found.add(source)
                pending.append(source)
        return found

    def path_around(self, a, b):
        """Whether a path leads from kernel a to kernel b through another one."""
        return any(a in self.before(x) for x in self.sources(b) - {a})

    def shape(self, k):
        shapes = [op.shape for _, op in self.kernels[k]]
        return next((shape for shape in reversed(shapes) if shape.inner > 1), shapes[0])

    def first(self, k):
        return min(position for position, _ in self.kernels[k])

    def is_extern(self, k):
        return self.kernels[k][0][1].is_extern

    def is_worthwhile(self, shared, reads, other_reads, is_producer):
        """Whether two that read these buffers may fuse."""
        alive = {self.size[b] for b in reads & self.single} & {self.size[b] for b in other_reads & self.single}
        return (is_producer or shared >= LEAST_SHARED_BYTES) and sum(alive) <= REUSE_WEIGHT * shared

    def place(self, position, op):
        sources = self.sources_of(op.reads)
        near = {k for k in self.kernels if position - self.first(k) <= LONGEST_DISTANCE}
        touching = {k for k in self.kernels if op.reads & (self.reads(k) | self.makes(k))}
        related = [k for k in sorted(sources | near & touching) if not self.is_extern(k) and not op.is_extern]
        best, best_bytes = None, 0
        for k in related:
            shared = sum(self.size[b] for b in op.reads & (self.reads(k) | self.makes(k)))
            if any(k in self.before(s) for s in sources) or not shapes_fuse(self.shape(k), op.shape):
                continue
            if shared <= best_bytes or len(self.kernels[k]) >= MOST_OPS_FUSED:
                continue
            if self.is_worthwhile(shared, op.reads, self.reads(k), k in sources):
                best, best_bytes = k, shared
        self.kernels.setdefault(position if best is None else best, []).append((position, op))
        if best is not None:
            self.merge_others(position, best, [k for k in related if k != best])

    def merge_others(self, position, home, others):
        touches = {k: self.reads(k) | self.makes(k) for k in (home, *others)}
        shared = {k: sum(self.size[b] for b in touches[k] & touches[home]) for k in others}
        for k in sorted(others, key=lambda k: (-shared[k], k)):
            is_producer = k in self.before(home) or home in self.before(k)
            is_near = position - min(self.first(k), self.first(home)) <= LONGEST_DISTANCE
            if (
                shapes_fuse(self.shape(home), self.shape(k))
                and (is_producer or is_near)
                and len(self.kernels[home]) + len(self.kernels[k]) <= MOST_OPS_FUSED
                and self.is_worthwhile(shared[k], self.reads(home), self.reads(k), is_producer)
                and not self.path_around(home, k)
                and not self.path_around(k, home)
            ):
                old, new = sorted((home, k))
                first, second = (new, old) if new in self.before(old) else (old, new)
                self.kernels[old] = self.kernels[first] + self.kernels[second]
                del self.kernels[new]
                home = old


class PlainCpuFusion(CpuFusion):
    """Every pair looked at anew in every round; a cycle found by walking along the kernels."""

    def new_pairs(self, groups, fresh):
        return super().new_pairs(groups, set(groups))

    def is_cyclic(self, one, two):
        merged, seen, pending = {id(one), id(two)}, set(), [one, two]
        while pending:
            group = pending.pop()
            sources = {self.maker[b] for op in group.ops for b in op.reads if b in self.maker}
            for source in (self.group_of[k] for k in sources):
                if id(source) in merged and id(group) not in merged:
                    return True
                if id(source) not in merged | seen:
                    seen.add(id(source))
                    pending.append(source)
        return False


def has_late_argument(flow, program, kept):
    """Whether a library call comes between another and a value that is computed for this one alone."""
    users = {i: [u for u in program if i in flow.inputs[u]] for i in program}
    place = {i: position for position, i in enumerate(program)}
    for call in (i for i in program if flow.kind[i] is Kind.EXTERN):
        for argument in flow.inputs[call]:
            while len(users.get(argument, ())) == 1 and flow.kind[argument] is Kind.VIEW and flow.inputs[argument]:
                argument = flow.inputs[argument][0]
            is_alone = len(users.get(argument, ())) == 1 and flow.buffer[argument] not in kept
            if is_alone and flow.kind[argument] is Kind.POINTWISE:
                between = program[place[argument] + 1 : place[call]]
                if any(flow.kind[i] is Kind.EXTERN for i in between):
                    return True
    return False


def by_place(kernels):
    """Each time the first of the kernels whose sources have run."""
    found, left = [], list(kernels)
    while left:
        made = {b for kernel in left for b in kernel.makes}
        found.append(next(kernel for kernel in left if not made.difference(kernel.makes) & kernel.reads))
        left.remove(found[-1])
    return found


def fused(facts, program, stored, kept):
    """Kernels as (ops, loop shape), in order."""
    if facts.loops_run_together:
        groups = sorted(PlainCpuFusion(facts, stored, kept).run(), key=lambda group: group.first)
        order = by_place if has_late_argument(facts.flow, program, kept) else in_order
        kernels = order([kernel_of(facts, tuple(group.ops)) for group in groups])
        return [(list(kernel.ops), kernel.shape) for kernel in kernels]
    found = Kernels(facts.shared_bytes, stored)
    for position, op in enumerate(stored):
        found.place(position, op)
    order = []

    def visit(k):
        for source in sorted(found.sources(k) - set(order)):
            if source not in order:
                visit(source)
        if k not in order:
            order.append(k)

    for k in sorted(found.kernels):
        visit(k)
    return [([op for _, op in found.kernels[k]], found.shape(k)) for k in order]


def joined_by_cat(timeline, stored, kept):
    """What is made in the result of a cat, by that result: both are stored, and no library call reads it before."""
    flow, found, taken = timeline.flow, {}, set()
    names = [str(node.target).split(".")[1] if flow.is_op[i] else "" for i, node in enumerate(flow.nodes)]
    is_loop = [kind in (Kind.POINTWISE, Kind.REDUCTION) for kind in flow.kind]
    on_cpu = flow.nodes[0].meta["val"].device.type == "cpu"
    for i in (i for i, name in enumerate(names) if name == "cat" and is_loop[i]):
        calls = [k for k, reads in enumerate(flow.reads) if i in reads and not is_loop[k]]
        for x in flow.inputs[i] if calls or on_cpu else ():
            before = [k for k, reads in enumerate(flow.reads[:i]) if x in reads and not is_loop[k]]
            is_own = flow.makes[x] == (x,) and is_loop[x] and names[x] not in ("cat", "index_put", "scatter_add")
            if is_own and x not in taken and not before:
                taken.add(x)
                if {x, i} <= stored and x not in kept:
                    found.setdefault(i, {i}).add(x)
    return found


def run(timeline, phase, program, kept, releasable, held, at_hand=frozenset()):
    facts, flow, hardware = timeline.facts, timeline.flow, timeline.hardware
    size, tangents = flow.size_bytes, set(tangents_of(flow))
    to_read, to_write = moves_of(flow)
    kernels = fused(facts, list(program), stored_ops(facts, program, kept, at_hand), kept)
    reads = [set().union(*(op.reads for op in ops)) for ops, _ in kernels]
    makes = [{b for op in ops for b in op.makes} for ops, _ in kernels]
    stored = set()
    for k, (ops, shape) in enumerate(kernels):
        spills = spilled_buffers(ops, shape, facts.longest_row)
        stored |= spills & not_in_rows(ops, facts.always_stored) | reduced_inside(ops) if facts.keeps_rows else spills
        elsewhere = kept.union(*(r for j, r in enumerate(reads) if j != k))
        stored |= makes[k] if ops[0].is_extern else makes[k] & elsewhere
    last = {b: k for k in range(len(kernels)) for b in reads[k] | makes[k]}
    mortal = (stored | releasable.keys()) - kept
    wholes = joined_by_cat(timeline, stored, kept)
    shared = set().union(*wholes.values())
    uses = {c: [k for k in range(len(kernels)) if wholes[c] & (reads[k] | makes[k])] for c in wholes}
    live, dead, rows, split, done = held + sum(releasable.values()), 0, [], set(), set()
    for k, (ops, shape) in enumerate(kernels):
        if ops[0].is_extern or not facts.loops_run_together:
            live, dead = live - dead, 0
        made = sorted(makes[k] & stored)
        alone = [b for b in made if b not in shared]
        dying = sorted(b for b in reads[k] | makes[k] if last[b] == k and b in mortal - shared)
        reused = in_place(timeline, ops, alone, [b for b in dying if b not in makes[k] and b not in tangents])
        if hardware.counts_fused:
            reused = 0 if ops[0].is_extern else -sum(size[b] for b in makes[k] - stored)
        live += sum(size[b] for b in alone) - reused
        live += sum(size[c] for c in wholes if k == uses[c][0])
        dropped = sum(size[b] for b in flow.makes[ops[0].op] if b in at_hand) if ops[0].is_extern else 0
        moved = sum(to_read[b] for b in reads[k] - makes[k]) + sum(to_write[b] for b in made)
        again = [b for b in made if b in dying and flow.kind[flow.op[b]] is not Kind.REDUCTION]
        moved += 0 if ops[0].is_extern else sum(to_read[b] for b in again)
        flop = sum(facts.flop[i] for i in set().union(*(op.members for op in ops)))
        more = {op.op: timeline._more_kernels[op.op] for op in ops if op.op in timeline._more_kernels}
        launches = 1 + sum(more.values())
        seconds = max(moved / hardware.byte_per_s, flop / hardware.vector_flop_per_s) + launches * hardware.launch_s
        if ops[0].is_extern:
            note = timeline.joint.notes[flow.nodes[ops[0].op]]
            seconds = note.seconds if note.kind in (Kind.EXTERN, Kind.VALUE) else hardware.launch_s
        read_split = {i for i in split | done for b in flow.makes[i] if b in reads[k]}
        finished = {i for i in read_split if shape.inner == 1 and shape.outer == facts.shape[i].outer}
        needed = {flow.op[b] for b in reads[k] - makes[k] if not flow.is_input[b]}
        joined = {i for i in finished & done if max(needed) <= i}
        seconds -= hardware.launch_s if finished & split or joined else 0
        done |= finished & split
        split = (split - finished) | set(more)
        rows.append((phase, ops[0].op, live + dropped, seconds))
        dead += sum(size[b] for b in dying) - reused
        dead += sum(size[c] for c in wholes if k == uses[c][-1] and c not in kept)
        if ops[0].is_extern:
            live, dead = live - dead, 0
    return rows


def in_place(timeline, ops, made, free):
    """Bytes of results that take the place of an input."""
    size, reused = timeline.flow.size_bytes, 0
    if ops[0].is_extern:
        base = timeline._written_over.get(ops[0].op)
        return size[base] if base in free and any(size[b] == size[base] for b in made) else 0
    for buffer in made:
        maker = next(k for k, op in enumerate(ops) if buffer in op.makes)
        allowed, wanted = {maker}, set(ops[maker].reads)
        for k in reversed(range(maker)):
            if wanted & set(ops[k].makes):
                allowed.add(k)
                wanted |= ops[k].reads
        for b in free:
            readers = {k for k, op in enumerate(ops) if b in op.reads}
            is_there = maker in readers and is_read_in_place(ops[maker], b)
            if size[b] == size[buffer] and is_there and readers <= allowed:
                free.remove(b)
                reused += size[buffer]
                break
    return reused


def simulate(timeline, saved):
    """(phase, node, live bytes, seconds) of every kernel, and the saved bytes; convolutions' copies are left out."""
    flow = timeline.flow
    size = flow.size_bytes
    forward, backward = orders(flow, saved)
    handed_over = {flow.buffer[i] for i in saved if not flow.is_input[flow.buffer[i]]}
    outputs = {flow.buffer[i] for i in flow.fwd_outputs if not flow.is_input[flow.buffer[i]]}
    tangents = set(tangents_of(flow))
    gradients = {b for b in (flow.buffer[i] for i in flow.bwd_outputs) if not flow.is_input[b] or b in tangents}
    rows = run(timeline, "forward", forward, handed_over | outputs, {}, 0)
    releasable = {b: size[b] for b in (handed_over - outputs) | tangents}
    rows += run(timeline, "backward", backward, gradients, releasable, sum(size[b] for b in outputs), handed_over)
    return rows, sum(size[b] for b in handed_over - outputs)
