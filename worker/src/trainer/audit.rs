//! Computes parts of steps again, to compare them bit for bit.

use std::mem;
use std::sync::Arc;

use elasticdl_collective::device::Path;
use elasticdl_collective::zeros;
use elasticdl_proto::RecordRange;

use super::Trainer;
use super::parts::Parts;
use super::stopped::{Stopped, check_sums};
use crate::audit::PartDigest;
use crate::buckets::SummedBuckets;
use crate::external::Comparison;
use crate::failure::Failure;
use crate::metrics;
use crate::model::Model;
use crate::session::header::StepHeader;
use crate::tensors::Tensors;

impl<M: Model> Trainer<'_, M> {
    /// Computes a part of another rank by itself.
    pub(super) fn audit(&mut self, ranges: &[RecordRange]) -> Result<(), Stopped> {
        let digest = self.digest_again(ranges);
        self.session.assignment.audited(*digest.as_ref().unwrap_or(&None));
        digest.map(drop).or_else(|stopped| self.halt_of_program(stopped))
    }

    /// Computes parts again of which ranks have computed different gradients.
    pub(super) fn recheck(&mut self, parts: &[Vec<RecordRange>]) -> Result<(), Stopped> {
        let (mut digests, mut computed) = (Vec::new(), Ok(()));
        for part in parts {
            match self.digest_again(part) {
                Ok(Some(digest)) => digests.push(digest),
                Ok(None) => break,
                Err(stopped) => {
                    computed = Err(stopped);
                    break;
                }
            }
        }
        // Digests that do not fit the parts say that some are missing.
        self.session.rechecked(digests);
        computed.or_else(|stopped| self.halt_of_program(stopped))
    }

    /// The records of a task are computed next.
    pub(super) fn compare_own(&mut self) {
        self.compare(match self.session.assignment.needs_own_digest() {
            true => Comparison::Own,
            false => Comparison::None,
        });
    }

    fn compare(&mut self, comparison: Comparison) {
        if let Some(bridge) = self.model.as_bridge() {
            bridge.compare(comparison);
        }
    }

    /// Digest of a part that is computed by itself; `None` if its records can't be read now.
    fn digest_again(&mut self, ranges: &[RecordRange]) -> Result<Option<u64>, Stopped> {
        self.compare(Comparison::Again);
        let digest = self.digest_of(ranges);
        self.compare(Comparison::None);
        // What the program reports was counted where the records were computed first.
        drop(metrics::take_reported());
        digest
    }

    fn digest_of(&mut self, ranges: &[RecordRange]) -> Result<Option<u64>, Stopped> {
        let order = Arc::clone(&self.order);
        let fail = |error| Failure::on_records(error, order.ranges(ranges));
        let most = self.model.max_micro_batch().unwrap_or(usize::MAX).max(1);
        let pieces = match self.exact {
            Some(_) => {
                self.session.micro_batches(ranges).into_iter().map(|one| vec![one]).collect()
            }
            None => vec![ranges.to_vec()],
        };
        let (mut digest, mut loss_sum) = (PartDigest::default(), 0.0);
        for piece in pieces {
            let (mut records, mut parts) = (Vec::new(), Parts::default());
            for range in piece {
                let Some(taken) = self.take(range)? else { return Ok(None) };
                if taken.rest.is_some() {
                    return Ok(None);
                }
                parts.push(range, range.len());
                records.extend(taken.records);
            }
            self.begin_again();
            let mut computed = Ok(());
            while computed.is_ok() && !records.is_empty() {
                let rest = records.split_off(records.len().min(most));
                let batch = mem::replace(&mut records, rest);
                let positions = parts.split_off(batch.len() as u64);
                computed = self.gradients(batch, &positions).map(|loss| loss_sum += loss);
            }
            self.end_again(&mut digest);
            computed.map_err(fail)?;
        }
        Ok(Some(digest.end(loss_sum)))
    }

    /// The gradients that follow are computed again, in memory of their own.
    fn begin_again(&mut self) {
        if let Some(bridge) = self.model.as_bridge() {
            bridge.begin_gradient();
        }
        match (&mut self.exact, &mut self.tensors) {
            (Some(exact), _) => exact.add(),
            (None, Tensors::Host { state, .. }) => {
                match self.audited.len() == state.gradient.len() {
                    true => self.audited.fill(0.0),
                    false => self.audited = zeros(state.gradient.len()),
                }
                mem::swap(&mut self.audited, &mut state.gradient);
            }
            (None, Tensors::Device { .. }) => unreachable!("models on GPUs are not audited"),
        }
    }

    fn end_again(&mut self, digest: &mut PartDigest) {
        match (&mut self.exact, &mut self.tensors) {
            (Some(exact), _) => {
                digest.add(exact.last().expect("it was just added"));
                exact.drop_last();
            }
            (None, Tensors::Host { state, .. }) => {
                mem::swap(&mut self.audited, &mut state.gradient);
                digest.add(&self.audited);
            }
            (None, Tensors::Device { .. }) => {}
        }
    }

    /// This rank has computed the records of a task: takes their digest, if they are audited.
    pub(super) fn note_own_digest(&mut self) {
        if self.session.assignment.needs_own_digest() {
            let digest = self.own_digest();
            self.session.assignment.set_own_digest(digest);
        }
    }

    /// Takes the digest of the gradient anew, at the last moment before it is summed.
    pub(super) fn renew_own_digest(&self, header: &mut StepHeader) {
        let StepHeader { audit, ranges, .. } = header;
        if let Some((audited, digest)) = audit.as_mut().and_then(|audit| audit.own.as_mut())
            && audited == ranges
        {
            *digest = self.own_digest();
        }
    }

    /// Sums a step that is audited once more: what a processor, a memory or a link has changed in
    /// one sum is not in the other. A collective operation of the group.
    pub(super) fn sum_again(&mut self, headers: &[StepHeader], path: Path) -> Result<(), Stopped> {
        if headers.len() == 1 || headers.iter().all(|header| header.audit.is_none()) {
            return Ok(());
        }
        let first = self.tensors.sum_digest();
        let buckets = self.model.bucket_len().map(|len| SummedBuckets { len, summed: 0 });
        self.tensors.sum(&[], path, buckets)?;
        check_sums(first, self.tensors.sum_digest())
    }

    /// Whether a part of the step that is summed next is audited. A collective operation of the
    /// group.
    pub(super) fn is_audited(&mut self) -> Result<bool, Stopped> {
        if !self.session.audits() {
            return Ok(false);
        }
        let mine = [u8::from(self.session.assignment.is_audited())];
        Ok(self.tensors.group_mut()?.all_gather(&mine)?.iter().any(|one| **one == [1]))
    }

    fn own_digest(&self) -> u64 {
        let mut digest = PartDigest::default();
        match (&self.exact, &self.tensors) {
            (Some(exact), _) => exact.gradients().iter().for_each(|one| digest.add(one)),
            (None, Tensors::Host { state, .. }) => digest.add(&state.gradient),
            (None, Tensors::Device { .. }) => unreachable!("models on GPUs are not audited"),
        }
        digest.end(self.session.assignment.loss_sum())
    }
}
