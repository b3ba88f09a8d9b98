"""The simulator once more without anything kept from plan to plan: one pass over whole programs, kernels compared with
all kernels. Slow and short; what ``recompile.timeline`` gives must equal it in every figure.
"""

from recompile.dataflow import tangents_of
from recompile.fusion import (
    LEAST_SHARED_BYTES,
    LONGEST_DISTANCE,
    MOST_OPS_FUSED,
    REUSE_WEIGHT,
    shapes_fuse,
    spilled_buffers,
)
from recompile.inlining import MAX_OPS_INLINED, MAX_OPS_WHEN_REUSED, MAX_READS_WHEN_REUSED, StoredOp
from recompile.joint import Kind, Side


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
    flow, stored, inlined = facts.flow, [], {}
    ops = [i for i in program if flow.is_op[i]]
    for i in ops:
        sources = [inlined[b] for b in flow.reads[i] if b in inlined]
        reads = frozenset(b for b in flow.reads[i] if b not in inlined).union(*(s.reads for s in sources))
        members = frozenset([i]).union(*(s.members for s in sources))
        makes = tuple(b for b in flow.makes[i] if b not in at_hand)
        is_extern = flow.kind[i] not in (Kind.POINTWISE, Kind.REDUCTION)
        is_reduction = flow.kind[i] is Kind.REDUCTION
        op = StoredOp(i, reads, makes, members, 0, facts.shape[i], 0, is_extern, is_reduction, False, False)
        users = [u for u in ops for b in makes[:1] if b in flow.reads[u]]
        is_heavy = len(reads) > MAX_READS_WHEN_REUSED or len(members) > MAX_OPS_WHEN_REUSED
        if (
            flow.kind[i] is not Kind.POINTWISE
            or len(makes) != 1
            or i in facts.always_stored
            or makes[0] in kept
            or any(flow.kind[u] is Kind.EXTERN for u in users)
            or len(members) > MAX_OPS_INLINED
            or (len(users) > 1 and (is_heavy or members & facts.dear))
        ):
            stored.append(op)
        else:
            inlined[makes[0]] = op
    return stored


def fused(facts, stored):
    """Kernels as lists of (position, op), in order."""
    size = facts.flow.size_bytes
    single = {b for op in stored for b in op.makes if sum(b in other.reads for other in stored) == 1}
    kernels, shapes, follows = [], [], []  # follows: all kernels before one, however far
    made_by = {}
    for position, op in enumerate(stored):
        sources = {made_by[b] for b in op.reads if b in made_by}
        before = sources.union(*(follows[s] for s in sources))
        best, best_bytes = None, 0
        for k, kernel in enumerate(kernels):
            touched = set().union(*(o.reads.union(o.makes) for _, o in kernel))
            shared = sum(size[b] for b in op.reads & touched)
            blocked = any(k in follows[s] for s in sources)
            if op.is_extern or kernel[0][1].is_extern or blocked or not shapes_fuse(shapes[k], op.shape):
                continue
            is_far = position - kernel[0][0] > LONGEST_DISTANCE or shared < LEAST_SHARED_BYTES
            alive = {size[b] for b in op.reads & single} & {size[b] for _, o in kernel for b in o.reads & single}
            if shared <= best_bytes or (k not in sources and is_far) or len(kernel) >= MOST_OPS_FUSED:
                continue
            if sum(alive) <= REUSE_WEIGHT * shared:
                best, best_bytes = k, shared
        if best is None:
            best = len(kernels)
            kernels.append([])
            shapes.append(op.shape)
            follows.append(set())
        kernels[best].append((position, op))
        shapes[best] = op.shape if op.shape.inner > 1 else shapes[best]
        follows[best] |= before - {best}
        for k in range(len(kernels)):
            if best in follows[k]:
                follows[k] |= follows[best]
        made_by.update(dict.fromkeys(op.makes, best))
    return [([op for _, op in kernels[k]], shapes[k]) for k in ordered(kernels, made_by)]


def ordered(kernels, made_by):
    order = []

    def visit(k):
        needs = {made_by[b] for _, op in kernels[k] for b in op.reads if b in made_by} - {k} - set(order)
        for source in sorted(needs):
            if source not in order:
                visit(source)
        if k not in order:
            order.append(k)

    for k in range(len(kernels)):
        visit(k)
    return order


def run(timeline, phase, program, kept, releasable, held, at_hand=frozenset()):
    facts, flow, hardware = timeline.facts, timeline.flow, timeline.hardware
    size, tangents = flow.size_bytes, set(tangents_of(flow))
    kernels = fused(facts, stored_ops(facts, program, kept, at_hand))
    reads = [set().union(*(op.reads for op in ops)) for ops, _ in kernels]
    makes = [{b for op in ops for b in op.makes} for ops, _ in kernels]
    stored = set()
    for k, (ops, shape) in enumerate(kernels):
        stored |= spilled_buffers(ops, shape, facts.longest_row)
        elsewhere = kept.union(*(r for j, r in enumerate(reads) if j != k))
        stored |= makes[k] if ops[0].is_extern else makes[k] & elsewhere
    last = {b: k for k in range(len(kernels)) for b in reads[k] | makes[k]}
    mortal = (stored | releasable.keys()) - kept
    live, rows = held + sum(releasable.values()), []
    for k, (ops, _) in enumerate(kernels):
        made = sorted(makes[k] & stored)
        dying = sorted(b for b in reads[k] | makes[k] if last[b] == k and b in mortal)
        reused = in_place(timeline, ops, made, [b for b in dying if b not in makes[k] and b not in tangents])
        live += sum(size[b] for b in made) - reused
        dropped = sum(size[b] for b in flow.makes[ops[0].op] if b in at_hand) if ops[0].is_extern else 0
        moved = sum(size[b] for b in reads[k] - makes[k]) + sum(size[b] for b in made)
        flop = sum(facts.flop[i] for i in set().union(*(op.members for op in ops)))
        seconds = max(moved / hardware.byte_per_s, flop / hardware.vector_flop_per_s) + hardware.launch_s
        if ops[0].is_extern:
            note = timeline.joint.notes[flow.nodes[ops[0].op]]
            seconds = note.seconds if note.kind in (Kind.EXTERN, Kind.VALUE) else hardware.launch_s
        rows.append((phase, ops[0].op, live + dropped, seconds))
        live -= sum(size[b] for b in dying) - reused
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
            if size[b] == size[buffer] and maker in readers and readers <= allowed:
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
