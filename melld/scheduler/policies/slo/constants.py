"""The numbers of `mell-slo` that somebody chose, all of them; `docs/scheduling.md` says what each is for.

prior     what is assumed until it is observed, and how fast observations replace it
promise   what an operator, or a user, may judge
guard     a reserve, a horizon or a weight that keeps chance and arithmetic from deciding
"""

REMEMBERED, PACES_REMEMBERED = 2000.0, 512
"""Prior: an observation counts for 1/e after so many later ones: of a request that ended, or of a worker's pace."""
PRIOR_WEIGHT = 20.0
"""Prior: what is assumed of answers, or of a worker's own speed, weighs as much as so many observations."""
ANSWER_TOKENS = 200.0
"""Prior: the mean length of an answer; lengths are distributed exponentially."""
FULL_MEMORY, FULL_BATCH, BATCH = 1.6, 1.4, 64.0
"""Prior: a step takes so many times a lone one when memory is full, or with a batch of 64, as steps read all KV there
is, and memory is not much larger than the weights."""
LONG_TOKENS, LONG_TIMES = 32_768, 1.75
"""Prior: a prompt so long takes so many times what its tokens take in short prompts, as attention's part grows with the
length: by operations 1.3 to 1.8 for models of 1 to 70 billion weights, in the profiles of the simulator 1.9 to 2.4."""

BUCKET_TOKENS, BUCKETS = 8, 256
"""Guard: how finely lengths of answers are told apart, and up to where."""
REFRESH = 32
"""Guard: the shares of answers are reckoned anew after so many."""
POINTS = (16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
"""Guard: lengths at which the share of slow answers is looked up."""
SLOWEST = 4.0
"""Guard: a worker is thought slower or faster than others by so many times at most: a hiccup of seconds must not keep
it empty for minutes."""

MEMORY_PART, PROMPT_PART = 0.94, 0.6
"""Guard: the parts of a worker's memory and of its time that the load's KV and its prompts may take."""
STRICT_PART, STRICT_SLOW_PART = 0.9, 0.7
"""Guard: fewer workers serve only once their limits are kept strictly: so much of the memory, so much of the limit of
the prompts, and so much of the slow answers that may be.  The last needs more, as a little load changes it much."""
MEAN_S, GROWTH_S, CALM_S = 60.0, 16.0, 15.0
"""Guard: times over which prompts, growth, and a lower need are looked at."""
BURST_S = 2.0
"""Guard: a burst of prompts is looked at over the TTFT target, but at least over so long: a worker that it wakes takes
as long to come."""
LEAST_GROWTH_S, LEAST_SEEN = 4.0, 0.2
"""Guard: after the start, growth is taken over at least so long, prompts over at least that part of `MEAN_S`."""
SURE, SURE_GROWTH = 2.0, 1.75
"""Guard: standard deviations by which a rate of prompts, and a growth, that chance alone may show are discounted."""

ACCEPTED_S = 10.0
"""Guard: the prompts that one worker has accepted fade with this time constant."""
AHEAD_S = 3.0
"""Guard: growth of a worker's requests that a prediction of its steps includes."""
MOST_BUSY = 0.9
"""Guard: prompts take at most this part of a worker's time in such a prediction, however long one is."""
TTFT_PART = 0.8
"""Guard: part of the time until the first token that a placement may plan to use."""
LARGE_PART = 0.08
"""Guard: mean size, as a part of the capacity, above which requests are packed where memory sets the number of
workers."""
SPREAD = 0.1
"""Guard: how much spreading counts: a load that uses up a whole target weighs as much as so many slowed requests.  A
first token that is later by no more than this part counts as equally soon."""
SPILL = 0.3
"""Guard: leaving a worker beyond the service idle, so that it may sleep, is worth so many slowed requests."""
URGENT = 6.0
"""Promise: a target that an urgent request misses because of others counts as so many more misses, and so does any
request that joins an urgent one."""
FILL_PART = 0.5
"""Guard: part of the life that dispatch leaves a worker: a new worker fills meanwhile, and growth goes on elsewhere."""
WORTH_WAKING = 4.0
"""Guard: misses that waking another worker must save."""

LEAST_PRICE_S, FIRST_PRICE_S, MOST_PRICE_S = 4.0, 10.0, 60.0
"""Prior, between guards: seconds that a missing worker costs.  The most is what a service pays that keeps each idle GPU
awake for a minute, or more where `WORTH` says so."""
MOST_JUDGED = 100
"""Guard: the price and the caution follow after so many first tokens, and twice as many answers, at the latest."""
WORTH = 2.5
"""Promise: a request served in time is worth so many times the GPU-seconds that it takes."""
PRICE_UP, PRICE_DOWN, MOST_OVER = 1.25, 0.94, 4.0
"""Guard: for each time over that as many requests missed as may, at most so many, the price rises by `PRICE_UP`."""
LEAST_CAUTION, FIRST_CAUTION = 0.17, 0.25
"""Prior, above a guard: the part of the prompts' randomness that reaches a worker, as dispatch levels the rest."""
CAUTION_UP, CAUTION_DOWN = 1.15, 0.95
"""Guard: steps of the caution, where more answers were slow than may be, and where not."""

GAIN = 0.95
"""Guard: workers get roles where that lowers the pressure to this part, as a change costs something, too."""
