//! Whether a launch has been scheduled.

/// Whether a launch has been scheduled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Scheduling {
    /// Not known yet.
    #[default]
    Pending,
    /// A queue holds it back.
    Queued,
    /// It runs, or is about to.
    Scheduled,
    /// No node has enough capacity for it.
    Unschedulable,
}

impl Scheduling {
    /// Whether it waits for capacity.
    pub(crate) fn is_held(self) -> bool {
        matches!(self, Self::Queued | Self::Unschedulable)
    }
}
