"""The messages of each link between two processes, as tagged unions.

api ── tokenizer ── scheduler ── worker
"""

from radixrt.messages.adapters import AdapterRead, LoadAdapter, PutAdapter
from radixrt.messages.answers import AnswerBatch, EngineInfo, RequestFailed
from radixrt.messages.calls import AnyCall, AnySchedulerCall, CallReply
from radixrt.messages.grammars import DropGrammar, GrammarLoaded, LoadGrammar
from radixrt.messages.images import DropImage, HurryImage, ImageLoaded, LoadImage
from radixrt.messages.moves import (
    ClearPages,
    OpenPages,
    PagesRead,
    PagesWritten,
    ReadPages,
    SavePages,
)
from radixrt.messages.replicas import (
    EventsReplayed,
    JoinAgain,
    Joined,
    JoinRefused,
    Ping,
    ReplayEvents,
    ReplicaDrained,
    ReplicaReport,
    RequestsLost,
)
from radixrt.messages.requests import AbortRequest, GenerateRequest
from radixrt.messages.sequences import ReleaseSequences, SequenceRequest, TokenBatch
from radixrt.messages.steps import ExpertTokens, StepPlan, StepResult

ToTokenizerFromApi = GenerateRequest | AbortRequest | AnyCall

ToApi = EngineInfo | AnswerBatch | RequestFailed | CallReply | RequestsLost

ToScheduler = (
    LoadGrammar
    | DropGrammar
    | LoadImage
    | HurryImage
    | DropImage
    | SequenceRequest
    | ReleaseSequences
    | AnySchedulerCall
    | ReplayEvents
)

ToJoinedEngine = Joined | JoinRefused | JoinAgain | Ping | ToScheduler

ToTokenizerFromScheduler = (
    EngineInfo | TokenBatch | CallReply | ReplicaReport | EventsReplayed | ReplicaDrained
)

WorkerOrder = (
    LoadGrammar | DropGrammar | LoadImage | HurryImage | DropImage | LoadAdapter | PutAdapter
)
"""Orders that are no step; the worker follows them in their order."""

PageMove = OpenPages | ClearPages | SavePages | ReadPages

ToWorker = StepPlan | WorkerOrder | PageMove

ToSchedulerFromWorker = (
    EngineInfo
    | StepResult
    | GrammarLoaded
    | ImageLoaded
    | ExpertTokens
    | AdapterRead
    | PagesWritten
    | PagesRead
)
