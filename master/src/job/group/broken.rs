//! Broken links, and which member is at fault.
//!
//! A link breaks because a member at its end is lost, which the master learns by itself after a
//! short wait, or because of the network. Then members report whom they suspect.

use elasticdl_proto::{Generation, WorkerId};

use super::generation::Group;
use super::stall::Suspect;
use crate::job::time::Time;

/// Reports of broken links.
#[derive(Debug, Default)]
pub(crate) struct Broken {
    /// When the wait for an explaining loss ends.
    until: Time,
    suspects: Vec<WorkerId>,
    reporters: Vec<WorkerId>,
    /// Whether a reporter knows the cause, which is no other member's link.
    is_explained: bool,
    /// Unanswered dials.
    unanswered: Vec<Suspect>,
}

/// The member that a reporter suspects of breaking its link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Suspicion {
    pub(crate) suspect: WorkerId,
    /// Whether the suspect answered no dial.
    pub(crate) is_unreachable: bool,
}

/// The last suspect, and in how many consecutive generations it was suspected without a commit in
/// between.
#[derive(Debug, Default)]
pub(super) struct Suspicions(Option<(WorkerId, u32)>);

impl Broken {
    /// Dials that were not answered.
    pub(crate) fn unanswered(&self) -> &[Suspect] {
        &self.unanswered
    }
}

impl Group {
    /// Whether links are broken that no known loss explains yet.
    pub(crate) fn awaits_explanation(&self) -> bool {
        self.broken.is_some()
    }

    /// Begins the wait for a loss that explains a broken link, until `until`. Returns whether none
    /// was on.
    pub(crate) fn begin_break(&mut self, until: Time) -> bool {
        let is_first = self.broken.is_none();
        if is_first {
            self.broken = Some(Broken { until, ..Broken::default() });
        }
        is_first
    }

    /// Notes a member's first report of a broken link. Returns the other member that it suspects.
    pub(crate) fn report_break(
        &mut self,
        reporter: WorkerId,
        suspicion: Option<Suspicion>,
    ) -> Option<WorkerId> {
        let is_explained = suspicion.is_none();
        let is_other = |s: &Suspicion| s.suspect != reporter && self.members.contains(&s.suspect);
        let suspicion = suspicion.filter(is_other);
        let broken = self.broken.as_mut().filter(|b| !b.reporters.contains(&reporter));
        if let Some(broken) = broken {
            broken.reporters.push(reporter);
            match suspicion {
                Some(Suspicion { suspect, is_unreachable: true }) => {
                    broken.unanswered.push((reporter, suspect));
                }
                Some(Suspicion { suspect, .. }) => broken.suspects.push(suspect),
                None => broken.is_explained |= is_explained,
            }
        }
        suspicion.map(|s| s.suspect)
    }

    /// Whether the report of a broken link names `worker`.
    pub(crate) fn is_suspected(&self, worker: WorkerId) -> bool {
        self.broken.as_ref().is_some_and(|b| {
            b.suspects.contains(&worker) || b.unanswered.iter().any(|s| s.1 == worker)
        })
    }

    /// The reports of broken links of `generation`, if the wait for an explanation is over.
    pub(crate) fn take_broken(&mut self, now: Time, generation: Generation) -> Option<Broken> {
        self.broken.take_if(|b| generation == self.generation && b.until <= now)
    }

    /// Extends the wait for an explanation.
    pub(crate) fn put_back(&mut self, broken: Broken, until: Time) {
        self.broken = Some(Broken { until, ..broken });
    }

    /// The members need new links.
    pub(crate) fn renew_links(&mut self) {
        self.needs_links = true;
    }

    /// Renews the links after reports that no loss explains. Returns the member to evict, if one
    /// was suspected often enough.
    pub(crate) fn judge(&mut self, broken: &Broken) -> Option<WorkerId> {
        self.renew_links();
        if broken.is_explained {
            // The reporters' links ended because a neighbour closed them, and all members are
            // alive.
            self.clear_suspicion();
            return None;
        }
        // A reporter is alive. Among equals the highest rank is chosen, so that two workers that
        // suspect each other are not chosen alternately.
        let by_rank = |s: &&WorkerId| self.members.iter().position(|m| m == *s);
        let silent =
            broken.suspects.iter().filter(|s| !broken.reporters.contains(s)).max_by_key(by_rank);
        let &suspect = silent.or_else(|| broken.suspects.iter().max_by_key(by_rank))?;
        let times = match self.suspicions.0 {
            Some((before, times)) if before == suspect => times + 1,
            _ => 1,
        };
        self.suspicions.0 = Some((suspect, times));
        (times >= SUSPICIONS_MAX).then_some(suspect)
    }

    /// Forgets whom members suspect.
    pub(crate) fn clear_suspicion(&mut self) {
        self.suspicions.0 = None;
    }

    /// A commit shows that all links work.
    pub(crate) fn note_commit(&mut self) {
        self.clear_suspicion();
        self.blame.clear();
    }
}

/// Consecutive generations that break on the same worker before it is evicted.
const SUSPICIONS_MAX: u32 = 3;
