//! The memberships that the master sends to a worker: the newest one, and what they have made of
//! the worker so far, a member or one without which its group goes on.
//!
//! Messages can arrive late or twice, and several masters may have sent them. **Invariant:** the
//! newest generation only grows; a membership that is not newer changes nothing.

use elasticdl_proto::Membership;

/// What this worker knows of its memberships.
#[derive(Clone, Debug, Default)]
pub(super) struct Memberships {
    pub(super) latest: Option<Membership>,
    /// A membership arrived during the outcome of a step, and whether one of them aborts.
    pub(super) deferred: Option<bool>,
    /// Whether this worker has been in a membership. A later one without it means that the group
    /// goes on without it.
    pub(super) was_member: bool,
    /// Whether the group that this worker is in, or joins, follows a loss.
    pub(super) follows_loss: bool,
    /// Whether the group went on without this worker, whose state may be much older than others'.
    pub(super) has_stood_by: bool,
    /// Whether this worker has been in a group that reached a common state.
    pub(super) was_in_group: bool,
    /// The step with whose state, a copy of another rank's, this worker became a member.
    pub(super) copied_at: Option<u64>,
}

impl Memberships {
    /// Takes in a membership. Returns whether it is news.
    pub(super) fn receive(&mut self, membership: Membership) -> bool {
        let is_news =
            self.latest.as_ref().is_none_or(|latest| latest.generation < membership.generation);
        if is_news {
            self.latest = Some(membership);
        }
        is_news
    }

    /// Number of the newest generation; 0 before the first.
    pub(super) fn newest_generation(&self) -> u64 {
        self.latest.as_ref().map_or(0, |latest| latest.generation.0)
    }
}
