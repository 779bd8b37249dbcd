//! What a rank audits in a step, and what is audited of it.

use elasticdl_proto::RecordRange;

use super::phase::Group;
use super::types::JobPlan;
use crate::session::audit::{AuditHeader, Audited, Dispute};
use crate::session::header::StepHeader;
use crate::session::plan::Contribution;

/// What a rank audits, and what is audited of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Audit {
    /// Whether the next step is audited in place of one that could not be.
    pub(super) is_owed: bool,
    /// The part of the pending gradient that is audited, and its digest once it is computed.
    own: Option<(Vec<RecordRange>, Option<u64>)>,
    /// The part of another rank that this rank is to compute for the step.
    part: Option<Vec<RecordRange>>,
    of_others: Vec<Audited>,
}

impl Audit {
    /// Decides what is audited of this rank, and what it audits, in the step that these ranks
    /// compute next. `assigned`: the records of each rank.
    pub(super) fn plan(
        &mut self,
        (job, step): (&JobPlan, u64),
        group: &Group,
        (headers, ranks): (&[StepHeader], &[Contribution]),
        (keeps, assigned): (&[bool], &[Vec<RecordRange>]),
    ) {
        let Some(plan) = job.audit else { return };
        let can_read = ranks.iter().all(|rank| rank.readable.is_none());
        // After a commit, the headers are those of the step before, of which all ranks know.
        let is_told = headers.iter().any(|header| header.step == step && owes(header));
        let is_due = can_read && (self.is_owed || is_told || plan.chooses(step));
        let me = group.rank;
        if !keeps[me] {
            let is_audited = is_due && !assigned[me].is_empty();
            self.own = is_audited.then(|| (assigned[me].clone(), None));
        }
        let part_of = |rank: usize| match headers[rank].audit.as_ref() {
            Some(audit) if keeps[rank] => audit.own.as_ref().map(|(ranges, _)| ranges.clone()),
            _ if keeps[rank] || !is_due || assigned[rank].is_empty() => None,
            _ => Some(assigned[rank].clone()),
        };
        if !is_due && (0..ranks.len()).all(|rank| part_of(rank).is_none()) {
            self.part = None;
            return;
        }
        let host = |rank: usize| group.origins.get(rank).map_or("", |origin| origin.host.as_str());
        let hosts: Vec<&str> = (0..ranks.len()).map(host).collect();
        let part = part_of((me + plan.distance(&hosts, step)) % ranks.len());
        let is_known = |part: &Vec<RecordRange>| self.of_others.iter().any(|(of, _)| of == part);
        self.part = part.filter(|part| !is_known(part));
    }

    /// This rank has created or restored the state.
    pub(super) fn begin(&mut self, job: &JobPlan) {
        self.is_owed |= job.audit.is_some_and(|plan| plan.of_program);
    }

    /// The part that this rank is to compute before the step is summed.
    pub(super) fn part(&self) -> Option<&Vec<RecordRange>> {
        self.part.as_ref()
    }

    /// This rank has computed the part, with a gradient of this digest; `None`: it could not.
    pub(super) fn computed(&mut self, digest: Option<u64>) {
        self.of_others.extend(self.part.take().zip(digest));
    }

    /// Some records of the pending gradient are not in it.
    pub(super) fn not_computed(&mut self) {
        self.own = None;
    }

    /// Records of the pending gradient that are audited.
    pub(super) fn own(&self) -> Option<&[RecordRange]> {
        self.own.as_ref().map(|(ranges, _)| ranges.as_slice())
    }

    /// Whether the audited part is computed, and its digest is not known yet.
    pub(super) fn needs_own_digest(&self) -> bool {
        matches!(self.own, Some((_, None)))
    }

    pub(super) fn set_own_digest(&mut self, digest: u64) {
        self.own.iter_mut().for_each(|(_, own)| *own = Some(digest));
    }

    pub(super) fn header(&self) -> Option<AuditHeader> {
        let own = self.own.as_ref().and_then(|(ranges, digest)| Some((ranges.clone(), (*digest)?)));
        let (of_others, is_owed) = (self.of_others.clone(), self.is_owed);
        let is_any = own.is_some() || !of_others.is_empty() || is_owed;
        is_any.then_some(AuditHeader { own, of_others, is_owed, ..AuditHeader::default() })
    }

    /// The step of these headers is committed. Returns whether all of it was audited.
    pub(super) fn commit(&mut self, job: &JobPlan, headers: &[StepHeader]) -> bool {
        let (Some(plan), Some(first)) = (job.audit, headers.first()) else { return false };
        let was_due = self.is_owed
            || plan.chooses(first.step)
            || headers.iter().any(|header| header.audit.is_some());
        self.forget();
        let is_whole = headers.iter().all(|header| is_audited(header, headers));
        self.is_owed = was_due && !is_whole;
        was_due && is_whole
    }

    /// The pending gradient is absorbed, or given up.
    pub(super) fn forget(&mut self) {
        *self = Self { is_owed: self.is_owed, ..Self::default() };
    }
}

/// Whether this rank knows that a step before could not be audited.
fn owes(header: &StepHeader) -> bool {
    header.audit.as_ref().is_some_and(|audit| audit.is_owed)
}

/// Whether two ranks have computed all records of this header.
fn is_audited(header: &StepHeader, headers: &[StepHeader]) -> bool {
    let own = header.audit.as_ref().and_then(|audit| audit.own.as_ref());
    header.ranges.is_empty()
        || own.is_some_and(|(own, _)| {
            *own == header.ranges && others(headers).any(|(_, (ranges, _))| ranges == own)
        })
}

/// Parts that ranks have computed in place of others.
fn others(headers: &[StepHeader]) -> impl Iterator<Item = (usize, &Audited)> {
    headers.iter().enumerate().flat_map(|(rank, header)| {
        let parts = header.audit.iter().flat_map(|audit| &audit.of_others);
        parts.map(move |part| (rank, part))
    })
}

/// The parts of which ranks have computed different gradients.
pub(super) fn disputes(headers: &[StepHeader]) -> Vec<Dispute> {
    let mut disputes = Vec::new();
    for (rank, header) in headers.iter().enumerate() {
        let Some((ranges, own)) = header.audit.as_ref().and_then(|audit| audit.own.as_ref()) else {
            continue;
        };
        let of_others = others(headers).filter(|(_, (other, _))| other == ranges);
        let votes: Vec<(usize, u64)> = [(rank, *own)]
            .into_iter()
            .chain(of_others.map(|(by, (_, digest))| (by, *digest)))
            .collect();
        if votes.iter().any(|(_, digest)| digest != own) {
            disputes.push(Dispute { ranges: ranges.clone(), votes });
        }
    }
    disputes
}
