/// Counts of what happened in one run or in many, so that a test can assert that the faults reach
/// every code path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Coverage {
    /// Number of jobs.
    pub runs: u64,
    /// Number of events handled.
    pub events: u64,
    /// Number of faults injected.
    pub faults: u64,
    /// Number of generations published.
    pub generations: u64,
    /// Commits of a step on a rank.
    pub commits: u64,
    /// Commits of a step that another generation had committed, too: that one was undone with all
    /// ranks that held it, or its last ranks committed it in the newer generation.
    pub redone: u64,
    /// Commits by ranks that were no longer in the newest group.
    pub zombie_commits: u64,
    /// Ranks that were one step behind a new group and received that step's result.
    pub repaired_by_result: u64,
    /// Ranks that received the state in a repair.
    pub repaired_by_state: u64,
    /// States that joiners fetched from a donor.
    pub fetched: u64,
    /// Links from a donor that broke in a transfer, so that the joiner dialled it again.
    pub fetches_interrupted: u64,
    /// Transfers that went on over another link where the one before had broken.
    pub fetches_resumed: u64,
    /// Results of steps that joiners received after the state.
    pub followed: u64,
    /// Lineages that began with a new initial state, beyond the first one of a job.
    pub begun_again: u64,
    /// Checkpoints that were completed.
    pub checkpoints: u64,
    /// Checkpoints that a group began with.
    pub restored: u64,
    /// Groups that resumed from an older state, because all ranks that had the newer one were gone.
    pub gone_back: u64,
    /// Masters that were killed.
    pub masters_crashed: u64,
    /// Workers whose trainer thread hung.
    pub hung: u64,
    /// Bits that flipped in the state of a worker.
    pub flipped: u64,
    /// Workers that gave up their state because replicas differed.
    pub diverged: u64,
    /// Runs that ended early, as a wrong state was the only one, or was copied.
    pub void: u64,
    /// Workers of another build that were refused by their group.
    pub other_builds: u64,
    /// Storms of kills.
    pub storms: u64,
    /// Starts that failed on a bad host.
    pub bad_starts: u64,
    /// Masters of local jobs that resumed from a record which could not be kept up to date.
    pub resumed_outdated: u64,
    /// Masters that were replaced while they lived.
    pub masters_replaced: u64,
    /// Memberships that a replaced master has published.
    pub published_by_replaced: u64,
    /// Workers that the master has evicted.
    pub evicted: u64,
    /// Workers that reconnected to a master after their stream had ended.
    pub returned: u64,
    /// Runs in which faults hit the control plane only.
    pub control_only_runs: u64,
    /// Messages that were replayed to the master and had to be fenced.
    pub fenced: u64,
    /// Jobs that the user stopped before their end.
    pub stopped: u64,
    /// Steps of ranks that began over NCCL.
    pub nccl_steps: u64,
    /// Steps of ranks during which NCCL failed.
    pub nccl_failures: u64,
    /// Ranks that gave up NCCL for their group.
    pub nccl_given_up: u64,
    /// Pods of which one process failed while others ran.
    pub pods_failed: u64,
    /// Jobs that the user suspended.
    pub suspensions: u64,
    /// Computations for which some records could not be read.
    pub unread: u64,
    /// Commits of rows of tables on a rank.
    pub row_commits: u64,
    /// Ranks that said that all copies of rows are lost.
    pub rows_lost: u64,
}

impl Coverage {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        let Self { runs, events, faults, generations, commits, redone, zombie_commits, .. } = other;
        self.runs += runs;
        self.events += events;
        self.faults += faults;
        self.generations += generations;
        self.commits += commits;
        self.redone += redone;
        self.zombie_commits += zombie_commits;
        self.repaired_by_result += other.repaired_by_result;
        self.repaired_by_state += other.repaired_by_state;
        self.fetched += other.fetched;
        self.fetches_interrupted += other.fetches_interrupted;
        self.fetches_resumed += other.fetches_resumed;
        self.followed += other.followed;
        self.begun_again += other.begun_again;
        self.checkpoints += other.checkpoints;
        self.restored += other.restored;
        self.gone_back += other.gone_back;
        self.masters_crashed += other.masters_crashed;
        self.hung += other.hung;
        self.flipped += other.flipped;
        self.diverged += other.diverged;
        self.void += other.void;
        self.other_builds += other.other_builds;
        self.storms += other.storms;
        self.bad_starts += other.bad_starts;
        self.resumed_outdated += other.resumed_outdated;
        self.masters_replaced += other.masters_replaced;
        self.published_by_replaced += other.published_by_replaced;
        self.evicted += other.evicted;
        self.returned += other.returned;
        self.control_only_runs += other.control_only_runs;
        self.fenced += other.fenced;
        self.stopped += other.stopped;
        self.nccl_steps += other.nccl_steps;
        self.nccl_failures += other.nccl_failures;
        self.nccl_given_up += other.nccl_given_up;
        self.pods_failed += other.pods_failed;
        self.suspensions += other.suspensions;
        self.unread += other.unread;
        self.row_commits += other.row_commits;
        self.rows_lost += other.rows_lost;
    }
}
