"""Words of the report, explained: for people who have not seen one before."""

from __future__ import annotations

from recompile.decide import PREDICTION_MARGIN

TERMS = (
    (
        "peak",
        "The most bytes alive at once in forward and backward, over what is allocated when forward starts: kept "
        "values, temporaries, outputs and gradients. Parameters, optimizer state and the batch are not in it.",
    ),
    ("kept", "Handed from forward to backward. Inputs and parameters are allocated anyway and not counted."),
    (
        "computed again",
        "Run in forward and a second time in backward. What only backward needs runs once and is not in it. Its time "
        "is what it adds to the step: little for an op that runs inside of a kernel that waits for memory.",
    ),
    (
        "decided as other layers are",
        "One layer alone made like another, in a simulation of the whole step: what it would keep, how long the step "
        "would take, and whether it would fit. Of several equal layers the nearest one is taken.",
    ),
    (
        "reason",
        "What would change if this value alone were decided the other way, by a simulation of the whole step; done for "
        "one of the values that are alike in equal layers with the same decisions. A figure of a layer with others "
        "says so, and is in no sum. What the value is made of is computed again with it, back "
        "to what is kept. Values share such work: one that spares little by itself may be kept beside others that are "
        "of use only together, and two that need the same work do not spare it twice.",
    ),
    (
        "us per MiB",
        "Microseconds that keeping spares for each MiB that it takes. Of a whole layer it ranks what memory is worth; "
        "of one value alone it is a hint.",
    ),
    (
        "slower if kept",
        "Ops that follow each other run in one kernel, which hands values on without storing them. A value that is "
        "kept must be written to memory and read again, and may part such a kernel in two: that can take longer than "
        "computing it again.",
    ),
    (
        "margin",
        f"Of a budget in bytes {PREDICTION_MARGIN:.0%} is held back for what the prediction misses: a plan must fit "
        "into the rest. Budgets to ask for have it in them.",
    ),
    (
        "FLOP/B",
        "Arithmetic intensity: operations per byte moved. Where it is low an op waits for memory, and run again inside "
        "of a kernel that reads the same it costs little; where it is high the arithmetic itself costs.",
    ),
    (
        "block boundary",
        "A value that all of the model that follows passes through, so that what follows is rebuilt from it alone. It "
        "need not be where a layer ends: the residual sum between attention and MLP is one too.",
    ),
    ("residual sum", "x + f(x), where f is a part of a layer, as attention or the MLP."),
    ("the model itself", "Code of the model outside of all its modules, as a loss in its forward()."),
    (
        "dropout mask, random numbers",
        "Dropout compares random numbers with its probability, and multiplies by the mask. The numbers are made of a "
        "seed, which is kept: made again they are the same.",
    ),
    (
        "minimum cut",
        "The cheapest way to cut a graph in two: which values to keep, if a byte had a price. The planner cuts at many "
        "prices, combines what it finds, and simulates each plan.",
    ),
    ("plans met", "Plans that the search tried on its way to this one and that no other beats in both peak and time."),
    ("no plan can be here", "A proven bound within the model of the step that plans are chosen by."),
    ("us, ms; KiB, MiB, GiB", "Millionths and thousandths of a second; 2 to the power of 10, 20 and 30 bytes."),
)


def reading() -> str:
    """The words, folded away; the first lines of the report lead here."""
    items = "".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in TERMS)
    return (
        "<section><details class=reading><summary>How to read this</summary>"
        f"<dl id=reading>{items}</dl></details></section>"
    )
