/// Declares the counts, and how those of two runs are added.
macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts of what happened in one run or in many, so that a test can assert that the
        /// faults reach every code path.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Coverage {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Coverage {
            /// Adds the counts of another run.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counts! {
    /// Number of jobs.
    runs,
    /// Number of events handled.
    events,
    /// Number of faults injected.
    faults,
    /// Number of generations published.
    generations,
    /// Commits of a step on a rank.
    commits,
    /// Commits of a step that another generation had committed, too: that one was undone with all
    /// ranks that held it, or its last ranks committed it in the newer generation.
    redone,
    /// Commits by ranks that were no longer in the newest group.
    zombie_commits,
    /// Ranks that were one step behind a new group and received that step's result.
    repaired_by_result,
    /// Ranks that received the state in a repair.
    repaired_by_state,
    /// States that joiners fetched from a donor.
    fetched,
    /// Links from a donor that broke in a transfer, so that the joiner dialled it again.
    fetches_interrupted,
    /// Transfers that went on over another link where the one before had broken.
    fetches_resumed,
    /// Results of steps that joiners received after the state.
    followed,
    /// Lineages that began with a new initial state, beyond the first one of a job.
    begun_again,
    /// Checkpoints that were completed.
    checkpoints,
    /// Checkpoints that a group began with.
    restored,
    /// Groups that resumed from an older state, because all ranks that had the newer one were gone.
    gone_back,
    /// Masters that were killed.
    masters_crashed,
    /// Workers whose trainer thread hung.
    hung,
    /// Bits that flipped in the state of a worker.
    flipped,
    /// Wrong gradients that were computed in audited steps.
    miscounted,
    /// Sums that were changed in audited steps.
    sums_changed,
    /// Workers that failed because an audit found a wrong gradient.
    audited,
    /// Workers that gave up their state because replicas differed.
    diverged,
    /// Runs that ended early, as a wrong state was the only one, or was copied.
    void,
    /// Workers of another build that were refused by their group.
    other_builds,
    /// Storms of kills.
    storms,
    /// Starts that failed on a bad host.
    bad_starts,
    /// Masters of local jobs that resumed from a record which could not be kept up to date.
    resumed_outdated,
    /// Masters that were replaced while they lived.
    masters_replaced,
    /// Memberships that a replaced master has published.
    published_by_replaced,
    /// Workers that the master has evicted.
    evicted,
    /// Workers that reconnected to a master after their stream had ended.
    returned,
    /// Runs in which faults hit the control plane only.
    control_only_runs,
    /// Messages that were replayed to the master and had to be fenced.
    fenced,
    /// Jobs that the user stopped before their end.
    stopped,
    /// Steps of ranks that began over NCCL.
    nccl_steps,
    /// Steps of ranks during which NCCL failed.
    nccl_failures,
    /// Ranks that gave up NCCL for their group.
    nccl_given_up,
    /// Pods of which one process failed while others ran.
    pods_failed,
    /// Jobs that the user suspended.
    suspensions,
    /// Computations for which some records could not be read.
    unread,
    /// Commits of rows of tables on a rank.
    row_commits,
    /// Those of steps whose rows were looked up while the step before was computed.
    foreseen,
    /// Ranks that gave their state up, as all copies of rows are lost.
    rows_lost,
    /// Commits of chunks of an optimizer's state on a rank.
    chunk_commits,
    /// Commits on a rank whose group broke before it had the parameters.
    not_gathered,
    /// Ranks in whose state older rows have taken the place of lost ones.
    rows_replaced,
    /// Evaluations of the model on a rank.
    evaluations,
}
