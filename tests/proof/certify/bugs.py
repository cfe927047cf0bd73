"""Tables of planted bugs, with the check that must catch each, and of right adapters.

`planted.py` finds a bug by its name; its definition is the mutation. A bug or adapter with a plus
is judged in each full run, others each week.
"""

from __future__ import annotations

OFF, TIMES = "the gradient is off by ", "the gradient is "
UNHEARD = "load() raises nothing on rank 0"
ALONE, TWO, MIXED = "bf16-distopt", "dp2-bf16-distopt", "moe-fp16-distopt"

#: The check, a layout and what is said there, and the bugs that were planted for the check. No
#: other check catches them.
OF_CHECKS = {
    ("whole-step", "dp1", "the gradient is 2 times the right one"): "+TwiceTheLoss",
    ("counts", "dp1", OFF): "+MeanOfMeans",
    ("packed-lengths", "dp2-packs", OFF): "+EvenSequences",
    ("split-step", "dp1", OFF): "+KeepsTheLastCall",
    ("rows-left-over", "dp1", "9 and 4 rows: the gradient is off by "): "+DropsTheRest",
    ("sizes-change", "dp1", " times the right one"): "+FirstStepsDivisor",
    ("uneven-replicas", "dp2", OFF): "+MeanOfReplicas",
    ("replica-without-rows", "dp2", "IndexError in "): "+RefusesNoRows",
    ("drawn-sizes", "dp1", OFF): "+SixAtMost",
    ("nothing-valid", "dp1", "the gradient is NaN"): "+StepOverZero",
    ("unwatched-steps", "dp2-distopt", " than its replica"): "+HooksStayOff",
    ("auxiliary-losses", "dp2-moe", OFF): "+CallsCountAlike",
    ("logprobs-in-mid-step", "dp1", "the step has moved no parameter"): "+LogprobsZeroGradients",
    ("export-in-mid-step", "dp1", "a step that has not finished has changed"): "+ExportRounds",
    ("abort-and-retry", "dp1", "abort() has changed"): "+AbortUpdates",
    ("failure-on-one-rank", "dp1", "rank 0 finished the step"): "+SwallowsErrors",
    ("nan", "dp1", "the step updated all the same"): "+UpdatesWithNaN",
    ("second-run", "dp1", OFF): "+WarmsUpTwice",
    ("resume", "dp1", OFF): "+ForgetsMoments",
    ("offload-between-steps", "dp1", OFF): "+LosesMomentsOnTheHost",
    ("logprobs-while-offloaded", "dp1", "after onload(training="): "+BringsNothingBackForLogprobs",
    ("offload-in-mid-step", "dp1", "the step has moved no parameter"): "+DropsGradientsOffloaded",
    ("low-rank-adapters", "dp1", OFF): "+ForgetsTheRank",
    ("same-bits", "dp1", "in another order and two calls give other bits"): "+PromisesBits",
    ("save-and-go-on", ALONE, "after save() rank 0 has other random: torch"): "+SaveDraws",
    ("load-into-new-model", ALONE, "has other optimizer"): "AllocatesOnce",
    ("load-into-live-run", ALONE, "has other optimizer"): "KeepsForeignMoments",
    (
        "rollback",
        ALONE,
        "after the second load() in place rank 0 has other optimizer",
    ): "+LoadsOnce",
    ("saved-again", ALONE, "after load() of a later save() after as many"): "KeepsFirstOfSteps",
    ("async-save", ALONE, "rank 0 has other weights"): "WritesLate",
    ("load-weights-alone", ALONE, "the whole model has another "): "+LeavesMains",
    ("load-into-new-process", ALONE, "has other optimizer"): "RemembersItsSaves",
    ("reshard-dp", TWO, "the whole model has another "): "LosesMomentsOnOtherDP",
    ("reshard-tp", ALONE, "the whole model has another "): "+LosesMomentsOnOtherTP",
    (
        "reshard-tp",
        ALONE,
        "a load that failed (file missing) rank 0",
    ): "+LosesMomentsFirstOnOtherTP",
    ("reshard-pp", ALONE, "the whole model has another "): "LosesMomentsOnOtherPP",
    ("reshard-ep", "ep2-bf16-distopt", "the whole model has another "): "LosesMomentsOnOtherEP",
    ("reshard-cp", ALONE, "the whole model has another "): "LosesMomentsOnOtherCP",
    ("keeps-scheduler", ALONE, "has other scheduler: num_steps is 7 instead of 3"): "AddsSteps",
    ("keeps-random", "tp2-bf16-distopt", "has other random: tracker"): "ForgetsTracker",
    ("keeps-loss-scale", MIXED, "has other loss scale: of optimizer 0"): "ForgetsScale",
    ("keeps-expert-bias", MIXED, "has other expert bias"): "ForgetsBuffers",
    ("keeps-auxiliary-losses", MIXED, "has other auxiliary losses"): "ForgetsLogs",
    ("keeps-counters", ALONE, "has other counters: steps is 3 instead of 2"): "CountsOn",
    ("offload-one-part", ALONE, "after offload(only='optimizer')"): "LosesMomentsAlone",
    ("offload-again", ALONE, "after another offload rank 0 has other optimizer"): "OffloadsOnce",
    ("saved-while-frozen", ALONE, "weights are frozen rank 0 has other weights"): "LeavesFrozenOut",
    ("saved-while-frozen", ALONE, "after a step while it is frozen "): "StepsFrozen",
    ("failed-save", TWO, "takes the run for saved"): "+OneRankKnowsOfWrites",
    (
        "failed-load-file-missing",
        ALONE,
        UNHEARD,
    ): "MissingIsNew RemembersWhatItWrote",
    ("failed-load-file-truncated", ALONE, "rank 0 has other weights"): "EmptiesFirst",
    ("failed-load-rank-cannot-read", TWO, UNHEARD): "RankZeroLooks",
}
#: The same of bugs that more checks catch, or that need other sizes, places, times or layouts.
MORE = {
    ("whole-step", "dp2", "finish() reports the gradient norm "): "+OneRankReportsAnotherNorm",
    ("whole-step", "dp2", "finish() reports the loss "): "ReportsAnotherLoss",
    ("whole-step", "dp2", "the gradient is off by 0."): "+Bfloat16Sums",
    ("whole-step", "dp1", "set to clip gradients (clip_grad is 0.1): certify judges"): "+Clips",
    ("whole-step", "dp2", "0.125 times the right one, and the norm that finish()"): "+ClipsItself",
    ("logprobs-in-mid-step", "dp1", "the step trains in eval mode: "): "+EvalLeftOn",
    ("whole-step", "moe", TIMES): "+SaysThatItAverages",
    ("whole-step", "dp2-packs", TIMES): (
        "+SeesTheWholePack PositionsGoOn PredictsTheNextSequence +CountsPadding"
    ),
    ("packed-lengths", "dp2-packs", TIMES): "MeanOfPacks",
    ("whole-step", "moe-packs", "lack 1 of the step's sequences"): "+LosesASequence",
    ("whole-step", "cp2", OFF): "+CutsInHalves",
    ("whole-step", "cp2", "0.5 times the right one"): "CountsOnEachRank",
    ("split-step", "dp2-fsdp2", OFF): "+ReducesTheLastCallAlone",
    ("counts", "dp2-sequences", OFF): "+MeanOverPositions",
    ("counts", "dp2-sequences", "the gradient is 0.875 times"): "CountsMaskedSequences",
    ("whole-step", "dp2-moe-sequences", OFF): "+WeighsExpertsByPositions",
    ("whole-step", TWO, "times the right one"): "TwiceTheLoss",
    ("counts", TWO, OFF): "+MeanOfMeans",
    ("resume", TWO, "save() and load() has changed"): "+ForgetsMainParameters",
    ("whole-step", TWO, "its main parameter, rounded"): "+UpdatesTheModelAlone",
    ("whole-step", "dp2-fp16-distopt", "times the right one"): "TwiceTheLoss",
    ("counts", "dp2-fp16-distopt", OFF): "MeanOfMeans",
    ("resume", "dp2-fp16-distopt", "save() and load() has changed"): "ForgetsMainParameters",
    ("whole-step", "dp2-fp16-distopt", "its main parameter, rounded"): "UpdatesTheModelAlone",
    ("offload-between-steps", "dp1", "has moved and freed none of "): "+OffloadsNothing",
    ("offload-between-steps", "dp1", " tensors are on the host"): "+LeavesMomentsOnTheHost",
    ("offload-between-steps", "dp1", " tensors have no memory, "): "+LeavesGradientsFreed",
    ("logprobs-while-offloaded", "dp1", "log-probs differ from the "): "+KeepsOneCopy",
    ("offload-in-mid-step", "dp2", "is refused on some ranks"): "+OneRankRefusesTooLate",
    (
        "low-rank-adapters",
        "dp2",
        "the step has moved decoder.layers.0.mlp.linear_fc1.to_wrap.weight, which is frozen",
    ): "+NudgesTheBase",
    ("low-rank-adapters", "tp2", ".weight than its replica"): "+SharedFactorUnmarked",
    ("drawn-sizes", "dp1", ""): (
        "MeanOfCalls RowsWeighCalls OddMicrobatchDropped SixMicrobatches EightOfACall "
        "+FourthCallLost EmptyCallEnds EmptyCallZeroes EmptyCallForgetsTokens PadsByRepeating "
        "CountsInBF16 CountsTheFirstToken LossOfCalls CleanAfterEmpty"
    ),
    ("nothing-valid", "dp1", ""): (
        "LoneCallLost +NothingValidIsNaN NothingValidInAStep WeightsOutOfStep StopsAtMasked "
        "MaskedBeginsAgain MaskOfTheFirstStep"
    ),
    ("drawn-sizes", "dp2", ""): "SingleCountedTwice CutsToTheLeast TokensOfRankZero",
    ("nothing-valid", "dp2", ""): "RankWithoutTokensStays",
    ("nothing-valid", "moe", ""): "SkipsMasked",
    ("drawn-sizes", "pp2", ""): "RepeatsToFillStages",
    ("packed-lengths", "packs", ""): "LengthsSortedAlone",
    ("failure-on-one-rank", "dp1", ""): (
        "SwallowsLaterCalls SwallowsBackward LastMicrobatchDecides SecondErrorIsQuiet "
        "KeepsFailedWindow UndoesTheLastCall FrozenByFailure"
    ),
    ("failure-on-one-rank", "pp2", ""): "SwallowsLaterLosses",
    (
        "failure-on-one-rank",
        "dp2",
        "",
    ): "+OnlyLastRankIsHeard DrainsCollectives ZeroesWhereItFailed",
    ("nan", "dp2", ""): "+NaNOfRankZero DropsItsOwnNaN",
    ("nan", "dp1", ""): "NaNOfTheFirst NaNUnlessInTheLastCall NaNClearsMoments",
    ("abort-and-retry", "dp1", ""): "AbortKeepsQueue EvalLeftByAbort HooksStayAfterAbort",
    ("unwatched-steps", "dp2-distopt", ""): "NeverGathers GathersLate",
    ("logprobs-in-mid-step", "dp2-distopt", ""): "LogprobsOfStale HooksLeftOff",
    ("export-in-mid-step", "dp2-distopt", ""): "+ExportsStale",
    ("export-in-mid-step", "dp1", ""): "ExportsZeros ExportsAPart ExportsTheFirst ExportsTheLast",
    ("logprobs-in-mid-step", "dp1", ""): "EvalLeftOn LogprobsOfTheStep",
    ("logprobs-in-mid-step", "fp16", ""): "ScaleFuncLost",
    ("second-run", "dp1", ""): "FifthStepForgets",
    ("rows-left-over", "dp1", OFF): "RestWeighsAsMuch PadsTheRest",
    ("logprobs-in-mid-step", "dp1", "log-probs differ "): (
        "+LogprobsStaySorted LogprobsOfEight +LogprobsOfContent +LogprobsOfATensor"
    ),
    ("resume", "dp1", "tensors that the next step has written to"): "+SavesLive",
    ("unwatched-steps", "dp1", "finish() says that it has not updated"): "+SkipsSpikes",
    ("drawn-sizes", "dp1", " times the right one"): "+ClipsItsOwn ClipsAtHundred",
    ("counts", "dp1", "the gradient is 0.1 times the right one"): "+CountsTenAtLeast",
    (
        "nan",
        "dp1",
        ", and the step updated all the same",
    ): "LooksForNaNAlone +LooksAtTheLossAlone LooksAtFourCalls",
    ("sizes-change", "bf16", "the gradient is 0.86"): "+SumsAsParameters",
    ("whole-step", "bf16", "the second moment of "): "+MomentsAsParameters",
    ("whole-step", "bf16", "the main value of "): "MainsAsParameters",
    ("sizes-change", "dp1", " times the right one"): "CountsInFloat16 +AddsUpCountsInFloat16",
    ("failure-on-one-rank", "dp1", " failed on rank 0 with a "): (
        "QuietAfterFourCalls LogsValueErrors LogsKeyErrors +LogsMemoryErrors LogsOutOfMemory "
        "LogsAssertions +LogsInterrupts +RunsAgain"
    ),
    ("unwatched-steps", "dp1", OFF): "+TwelfthKeepsGradients",
    ("whole-step", "dp1", "finish() returns "): (
        "FinishesWithNone FinishesWithDict +FinishesLater ReportsAWord"
    ),
    (
        "logprobs-in-mid-step",
        "dp1",
        "logprobs() returns ",
    ): "LogprobsInAList +LogprobsTurned LogprobsNowhere",
    ("split-step", "dp2", "of call 2 of replica 0 count "): "+LosesASecondCall",
    ("keeps-random", ALONE, "has other random: python"): "ForgetsPython",
    ("keeps-random", ALONE, "has other random: numpy"): "ForgetsNumPy",
    ("keeps-random", MIXED, "has other random: tracker expert-parallel-rng"): "ForgetsExperts",
    ("keeps-loss-scale", MIXED, "growth_tracker is 0 instead of 2"): "ForgetsGrowth",
    ("keeps-loss-scale", MIXED, "hysteresis_tracker is 2 instead of 1"): "ForgetsHysteresis",
    ("keeps-expert-bias", MIXED, "has other expert bias"): "RoundsBiases",
    ("load-into-new-model", ALONE, "step is 2.0 instead of 12.0"): "CountsIterations",
    ("async-save", ALONE, "has other random: python"): "SeedsAnewAsync",
    ("async-save", ALONE, "has other scheduler: num_steps is 1 instead of 3"): "StartsAnewAsync",
    ("async-save", ALONE, "load() of a later asynchronous save rank 0 has"): "WritesFirstAsync",
    (
        "failed-save",
        ALONE,
        "save_async() where rank 0 could not write raises nothing",
    ): "+WritesInVain",
    ("failed-save", ALONE, "RuntimeError in tests/proof/certify/planted_state.py"): "+FailsForGood",
    ("keeps-scheduler", ALONE, "has other scheduler"): "ForgetsBetas",
    ("failed-load-file-missing", ALONE, "after a load that failed"): "FailedLoadArmsStep",
    ("load-into-new-model", ALONE, "has other "): "EmptiesFactors",
    ("failed-load-file-missing", ALONE, "although 2-2.rest.0 is missing rank 0 has"): "RestMayMiss",
    ("failed-load-file-missing", ALONE, "a load that failed (a file is missing; "): "PutsByHalves",
    (
        "load-into-new-model",
        ALONE,
        "save() has left 0 bytes below subject.folder",
    ): "SavesElsewhere",
    ("failed-load-file-missing", TWO, "is missing, and load() raises nothing"): "ReadsRankZeros",
    ("failed-load-file-truncated", ALONE, " is empty, and load() raises nothing"): "EmptyIsNothing",
    (
        "load-weights-alone",
        ALONE,
        "after load() after load_weights() rank 0 has",
    ): "+WeightsForGood",
    ("failed-load-file-missing", ALONE, "a load_weights() although "): "WeightsIfThere",
    ("rollback", ALONE, "export() gives other weights than the model has"): "+ExportsBySteps",
    ("offload-again", ALONE, "an offload after load() rank 0 has other opt"): "CopiesAfterSteps",
    ("offload-again", ALONE, "failed midway after a step rank 0 has other opt"): "CopiesAtTheEnd",
    ("offload-again", ALONE, "after two offloads rank 0 has other optimizer"): "OffloadsAway",
    ("offload-again", ALONE, "are on the host"): "OffloadKnownAtTheEnd",
    ("reshard-dp", TWO, "has other scheduler: num_steps is 0"): "LosesSchedulerOnOtherDP",
    ("reshard-dp", TWO, "has other counters: iteration is 0"): "LosesCountersOnOtherDP",
    ("reshard-dp", "dp2-fp16-distopt", "has other loss scale"): "LosesScaleOnOtherDP",
    ("reshard-pp", "moe-bf16-distopt", "has other expert bias"): "LosesBiasesOnOtherPP",
    (
        "async-save",
        ALONE,
        "load() of an asynchronous save rank 0 has other ",
    ): "SharesWithThread SharesWithOwnThread",
    ("async-save", ALONE, "an asynchronous save rank 0 has other weights"): "SharesViewsWithThread",
    (
        "failed-save",
        ALONE,
        "could not write raises nothing, and load() of it Run",
    ): "+HearsNoThread",
    (
        "failed-save",
        ALONE,
        "rank 0 could not write, and saved() has not returned after 20 s; rank 0 is in ",
    ): "WaitsForItsThread",
    (
        "failed-save",
        TWO,
        "rank 0 could not write, and save() has not returned after 20 s; rank 1 "
        "is waiting in barrier(), called in tests/proof/certify/planted_state.py:",
    ): "+LeavesOutItsBarrier",
    ("load-into-new-process", ALONE, "RuntimeError in tests/proof/certify/plante"): "OrdersByHash",
    ("load-into-new-process", ALONE, "No such file or directory: "): "NamesByHash",
    ("failed-load-file-missing", ALONE, UNHEARD): "FallsBack",
    ("failed-load-file-truncated", ALONE, UNHEARD): "FallsBack",
    (
        "offload-one-part",
        ALONE,
        "an offload of gradients in an open step",
    ): "LosesGradients DoublesGradients",
}

OWN = "megatron_idempotent.proof.certify.adapters"
FORMATS = "megatron_idempotent.proof.certify.checkpoints"

#: A check, a layout, and adapters in unusual styles that the check may not accuse there.
RIGHT = {
    # A pack of each sequence, and padding that the model knows of, are right too.
    ("packed-lengths", "moe-packs"): "+OneSequenceEach +TellsOfPadding",
    ("abort-and-retry", "moe-packs"): "OneSequenceEach",
    # What a layout does not have is not told of it.
    ("whole-step", "tied"): "+SaysThatItAverages",
    ("split-step", "pp2"): "+WeightRaises",
    ("whole-step", "dp2-fsdp2"): "+ReducesTheLastCallAlone",
    ("whole-step", "dp2-sequences"): "MeanOverPositions CountsMaskedSequences",
    ("split-step", "dp2-sequences"): "MeanOverPositions CountsMaskedSequences",
    ("counts", "dp2-sequences"): "WeighsExpertsByPositions",
    # An offload in an open step may keep gradients, or be refused.
    ("offload-in-mid-step", "dp2"): "+KeepsGradients +OneRankRefuses",
    ("offload-in-mid-step", "dp2-fsdp2"): f"+{OWN}:FSDPSplitStep",
    ("load-weights-alone", ALONE): "+Everything +SyncsMains",
    ("offload-one-part", ALONE): "+Everything +GivesGradientsBack",
    ("offload-one-part", "bf16"): "+Everything",  # weights are in no buffer of their own
    ("failed-save", TWO): "+Threaded OwnThread",
    ("failed-load-file-missing", ALONE): "+InMemory",  # there are no files
    ("load-into-live-run", ALONE): f"+{FORMATS}:DPReshardable",
    ("load-into-new-model", ALONE): f"+{FORMATS}:LowRank",
    ("rollback", TWO): f"+{FORMATS}:LowRank",  # two steps that nobody looks between
    ("saved-again", ALONE): "RefusesSecondOfSteps",
    ("async-save", ALONE): "Threaded CopiesInThread",
}

#: Megatron's formats; what each does not promise is in the adapter's `cannot`. `ModelSpace` is for
#: releases whose writer takes it; docs/state.md has them.
_FORMATS = "DPReshardable FullyReshardable OnHost LowRank Training TrainingFully Legacy"
_ALL_FORMATS = " ".join(f"{FORMATS}:{name}" for name in _FORMATS.split())
#: All checks of a kind, a layout, and adapters that pass them.
RIGHT_IN_ALL = {
    ("steps", "dp1"): "Loop",
    ("steps", "dp2"): (
        "Loop KnownTotals ReplaysAfterFailure SortsByLength OneCallEach AllInOneCall AbortRebuilds"
    ),
    ("steps", "dp2-distopt"): "Loop AbortRebuilds SumsOutside",
    ("steps", "pp2"): "OneCallEach AllInOneCall",
    ("state", TWO): f"Everything {_ALL_FORMATS}",
    ("state", "ep2-fp16-distopt"): _ALL_FORMATS,
    **{
        ("state", where): "Everything"
        for where in (MIXED, "dp2-distopt", "tp2-pp2", "ep2-fp16", "vpp2-bf16")
    },
}
