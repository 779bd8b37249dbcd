//! Division of records into micro-batches, ahead of the trainer's requests.
//!
//! A loader with worker processes draws micro-batches before their step begins. They are cut where
//! the steps are expected to end: a step takes as many records of this worker as the last ones did,
//! and no records of two epochs. If a request differs, because the group has changed or the epoch
//! ends, then the micro-batches that do not fit are discarded, and their records are drawn again.
//!
//! A model with tables announces the ids of all micro-batches of a request before it computes the
//! first. Those that do not fit are discarded then. Several requests may be announced one after the
//! other, before the gradient of the first is computed. If the rows can't be looked up, because the
//! group has changed, other requests take their place, and what was announced counts only if it
//! fits those.
//!
//! **Invariant:** a micro-batch counts only if its records are the next ones of the request, so
//! that a step contains each of its records exactly once.

use std::collections::VecDeque;

use super::numbers::Record;

/// Micro-batches that were drawn, and the records that the trainer waits for.
#[derive(Debug)]
pub(super) struct MicroBatches {
    /// Maximum number of records of a micro-batch.
    len_max: usize,
    /// Whether the request is cut as any other one of so many records: a shorter micro-batch does
    /// not count.
    is_strict: bool,
    /// Micro-batches that were drawn and not delivered, in order.
    drawn: VecDeque<Vec<Record>>,
    /// Micro-batches whose ids are announced and which were not delivered, in order.
    announced: VecDeque<Vec<Record>>,
    /// Number of announced records whose gradient is computed now, and which were not delivered.
    computed: usize,
    /// Records of the request that were not delivered, in order.
    requested: VecDeque<Record>,
    /// Numbers of records of the last two requests.
    quotas: [usize; 2],
}

impl MicroBatches {
    pub(super) fn new(len_max: usize) -> Self {
        let (is_strict, drawn, announced, computed, requested) = Default::default();
        Self { len_max, is_strict, drawn, announced, computed, requested, quotas: [0; 2] }
    }

    /// What was announced has to be announced again.
    pub(super) fn start_over(&mut self) {
        while let Some(batch) = self.announced.pop_back() {
            self.drawn.push_front(batch);
        }
    }

    /// The trainer waits for the gradient of so many records, which are announced.
    pub(super) fn compute(&mut self, records: usize) {
        self.computed = records;
    }

    /// The trainer waits for the gradient of `records`, or for their ids. `is_strict`: they are cut
    /// in the same way on any worker, whatever it has drawn before.
    pub(super) fn request(&mut self, records: Vec<Record>, is_strict: bool) {
        self.is_strict = is_strict;
        self.quotas = [records.len(), self.quotas[0]];
        self.requested = records.into();
    }

    /// Whether all requested records are announced or, without tables, their gradient was
    /// delivered.
    pub(super) fn is_complete(&self) -> bool {
        self.requested.is_empty()
    }

    /// Number of micro-batches that were drawn and not delivered.
    pub(super) fn drawn(&self) -> usize {
        self.drawn.len()
    }

    /// Draws the next micro-batch. `ahead`: records that the trainer will request later, in order.
    /// `until`: the last epoch whose records may be drawn.
    pub(super) fn draw(
        &mut self,
        ahead: &VecDeque<Record>,
        until: Option<u32>,
    ) -> Option<Vec<Record>> {
        let stream = Stream { requested: &self.requested, ahead };
        let quota = self.quotas[0].max(self.quotas[1]).max(1);
        let mut at = 0;
        let mut end = stream.step_end(at, quota);
        for batch in &self.drawn {
            if at == end {
                end = stream.step_end(at, quota);
            }
            let is_requested = at < self.requested.len();
            let fits = at + batch.len() <= end
                && (!self.is_strict || !is_requested || batch.len() == self.next_len(end - at))
                && batch.iter().enumerate().all(|(i, record)| stream.at(at + i) == Some(*record));
            at += if fits { batch.len() } else { 0 };
        }
        if at == end {
            end = stream.step_end(at, quota);
        }
        let batch: Vec<Record> =
            (at..at + self.next_len(end - at)).filter_map(|at| stream.at(at)).collect();
        let is_wanted = |first: &Record| until.is_none_or(|until| first.epoch <= until);
        batch.first().is_some_and(is_wanted).then(|| self.draw_this(batch))
    }

    /// Number of records of the next micro-batch, if the step has so many `left`. The micro-batches
    /// of a step are about equal, so that no small one is left for layers such as BatchNorm.
    fn next_len(&self, left: usize) -> usize {
        left.div_ceil(left.div_ceil(self.len_max).max(1))
    }

    /// Draws the last micro-batch again. It will be discarded.
    pub(super) fn repeat(&mut self) -> Option<Vec<Record>> {
        let last = self.drawn.back()?.clone();
        Some(self.draw_this(last))
    }

    fn draw_this(&mut self, batch: Vec<Record>) -> Vec<Record> {
        self.drawn.push_back(batch.clone());
        batch
    }

    /// Number of records of the micro-batch that is delivered next, and whether it is the last one
    /// of the request; `None` if it does not count.
    pub(super) fn counted(&self) -> Option<(usize, bool)> {
        match self.announced.front() {
            Some(batch) => Some((batch.len(), self.computed == batch.len())),
            None => self.fits(),
        }
    }

    /// As [`counted`](Self::counted), for the micro-batch that was drawn first.
    fn fits(&self) -> Option<(usize, bool)> {
        let batch = self.drawn.front()?;
        let left = self.requested.len();
        let counts = left >= batch.len()
            && (!self.is_strict || batch.len() == self.next_len(left))
            && self.requested.iter().zip(batch).all(|(requested, record)| requested == record);
        counts.then_some((batch.len(), left == batch.len()))
    }

    /// Whether micro-batches are announced and not delivered.
    pub(super) fn is_announced(&self) -> bool {
        !self.announced.is_empty()
    }

    /// Announces the ids of the micro-batch that was drawn first. Returns whether it counts; if
    /// not, it is discarded. `None` if there is none.
    pub(super) fn announce(&mut self) -> Option<bool> {
        let counts = self.fits().is_some();
        let batch = self.drawn.pop_front()?;
        if counts {
            self.requested.drain(..batch.len());
            self.announced.push_back(batch);
        }
        Some(counts)
    }

    /// Takes the micro-batch that was announced first or, without tables, drawn first, if there is
    /// one. If it `counts`, the records of the request that it has are delivered.
    pub(super) fn deliver(&mut self, counts: bool) -> bool {
        if let Some(batch) = self.announced.pop_front() {
            self.computed = self.computed.saturating_sub(batch.len());
            return true;
        }
        let Some(batch) = self.drawn.pop_front() else { return false };
        if counts {
            self.requested.drain(..batch.len());
        }
        true
    }
}

/// The requested records, followed by those of later requests.
struct Stream<'a> {
    requested: &'a VecDeque<Record>,
    ahead: &'a VecDeque<Record>,
}

impl Stream<'_> {
    fn at(&self, at: usize) -> Option<Record> {
        match at.checked_sub(self.requested.len()) {
            None => self.requested.get(at).copied(),
            Some(at) => self.ahead.get(at).copied(),
        }
    }

    /// End of the step that begins with record `start`.
    fn step_end(&self, start: usize, quota: usize) -> usize {
        if start < self.requested.len() {
            return self.requested.len();
        }
        let Some(first) = self.at(start) else { return start };
        let is_of_step = |at: &usize| self.at(*at).is_some_and(|r| r.epoch == first.epoch);
        (start..start + quota).take_while(is_of_step).count() + start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(epoch: u32, numbers: std::ops::Range<u64>) -> Vec<Record> {
        numbers.map(|number| Record { epoch, number }).collect()
    }

    /// Micro-batches of up to 4, and a request of records 0 to 9.
    fn requested() -> MicroBatches {
        let mut batches = MicroBatches::new(4);
        batches.request(records(0, 0..10), false);
        batches
    }

    /// Delivers the micro-batch that was drawn first. Returns its records, and whether they count.
    fn deliver(batches: &mut MicroBatches) -> Option<(Vec<Record>, bool)> {
        let batch = batches.drawn.front().cloned();
        let counts = batches.counted().is_some();
        assert_eq!(batches.deliver(counts), batch.is_some());
        batch.map(|batch| (batch, counts))
    }

    #[track_caller]
    fn draws(batches: &mut MicroBatches, ahead: &[Record], expected: &[Vec<Record>]) {
        let ahead = ahead.to_vec().into();
        for expected in expected {
            assert_eq!(batches.draw(&ahead, None).as_ref(), Some(expected));
        }
        assert_eq!(batches.draw(&ahead, None), None);
    }

    #[test]
    fn micro_batches_end_where_steps_are_expected_to_end() {
        let mut batches = requested();
        let ahead = [records(0, 10..25), records(1, 0..5)].concat();
        let expected = [
            records(0, 0..4),
            records(0, 4..7),
            records(0, 7..10),
            records(0, 10..14),
            records(0, 14..17),
            records(0, 17..20),
            records(0, 20..23),
            records(0, 23..25),
            records(1, 0..3),
            records(1, 3..5),
        ];
        draws(&mut batches, &ahead, &expected);
        for expected in &expected[..3] {
            assert!(!batches.is_complete());
            assert_eq!(deliver(&mut batches), Some((expected.clone(), true)));
        }
        assert!(batches.is_complete());
        batches.request(records(0, 10..20), false);
        for expected in &expected[3..6] {
            assert_eq!(deliver(&mut batches), Some((expected.clone(), true)));
        }
    }

    #[test]
    fn what_a_changed_request_does_not_fit_is_discarded_and_drawn_again() {
        let mut batches = requested();
        let ahead = records(0, 10..20);
        let first = [0..4, 4..7, 7..10, 10..14, 14..17, 17..20].map(|range| records(0, range));
        draws(&mut batches, &ahead, &first);
        (0..3).for_each(|_| assert!(deliver(&mut batches).unwrap().1));
        // The group is larger now: this worker's share is 5.
        batches.request(records(0, 10..15), false);
        let expected = [records(0, 14..15), records(0, 15..18), records(0, 18..20)];
        draws(&mut batches, &records(0, 15..20), &expected);
        let delivered: Vec<_> = (0..6).map(|_| deliver(&mut batches).unwrap()).collect();
        assert_eq!(delivered[0], (records(0, 10..14), true));
        assert_eq!(delivered[1], (records(0, 14..17), false));
        assert_eq!(delivered[2], (records(0, 17..20), false));
        assert_eq!(delivered[3], (records(0, 14..15), true));
        assert!(batches.is_complete());
        assert_eq!(delivered[4], (records(0, 15..18), false), "no request yet");
    }

    #[test]
    fn a_repeated_micro_batch_never_counts() {
        let mut batches = MicroBatches::new(4);
        batches.request(records(0, 0..3), false);
        draws(&mut batches, &[], &[records(0, 0..3)]);
        assert_eq!(batches.repeat(), Some(records(0, 0..3)));
        assert_eq!(deliver(&mut batches), Some((records(0, 0..3), true)));
        assert_eq!(deliver(&mut batches), Some((records(0, 0..3), false)));
        assert_eq!((deliver(&mut batches), batches.repeat()), (None, None));
    }

    #[test]
    fn records_of_another_epoch_are_other_records() {
        let mut batches = requested();
        draws(&mut batches, &[], &[records(0, 0..4), records(0, 4..7), records(0, 7..10)]);
        batches.request(records(1, 0..10), false);
        assert_eq!(deliver(&mut batches), Some((records(0, 0..4), false)));
    }

    #[test]
    fn records_of_a_later_epoch_are_not_drawn_before_it() {
        let mut batches = requested();
        let ahead: VecDeque<Record> = records(1, 0..3).into();
        let drawn = |batches: &mut MicroBatches, until| batches.draw(&ahead, Some(until));
        for expected in [0..4, 4..7, 7..10] {
            assert_eq!(drawn(&mut batches, 0), Some(records(0, expected)));
        }
        assert_eq!(drawn(&mut batches, 0), None);
        assert_eq!(drawn(&mut batches, 1), Some(records(1, 0..3)));
    }

    #[test]
    fn in_a_strict_cut_a_short_micro_batch_does_not_count() {
        for is_strict in [false, true] {
            let mut batches = MicroBatches::new(4);
            batches.request(records(0, 0..3), is_strict);
            let ahead = [records(0, 0..3), records(0, 3..6)];
            draws(&mut batches, &records(0, 3..6), &ahead);
            assert_eq!(batches.counted(), Some((3, true)));
            assert!(deliver(&mut batches).unwrap().1);
            // Three were expected, and there are seven.
            batches.request(records(0, 3..10), is_strict);
            assert_eq!(batches.counted(), (!is_strict).then_some((3, false)));
            assert_eq!(deliver(&mut batches), Some((records(0, 3..6), !is_strict)));
            let next = if is_strict { 3..7 } else { 6..10 };
            assert_eq!(batches.draw(&VecDeque::new(), None), Some(records(0, next)));
            assert_eq!(batches.counted(), Some((4, !is_strict)));
        }
    }

    #[test]
    fn requests_are_announced_one_after_the_other_before_they_are_computed() {
        let mut batches = requested();
        for (records, request) in [(10, None), (3, Some(records(0, 10..13)))] {
            request.into_iter().for_each(|request| batches.request(request, false));
            while !batches.is_complete() {
                batches.draw(&VecDeque::new(), None).unwrap();
                assert_eq!(batches.announce(), Some(true), "{records}");
            }
        }
        for expected in [vec![(4, false), (3, false), (3, true)], vec![(3, true)]] {
            batches.compute(expected.iter().map(|(records, _)| records).sum());
            for expected in expected {
                assert_eq!((batches.counted(), batches.deliver(true)), (Some(expected), true));
            }
        }
        assert!(!batches.is_announced());
    }

    #[test]
    fn what_was_announced_counts_in_the_next_request_if_it_fits() {
        let mut batches = requested();
        let ahead = VecDeque::new();
        let first = batches.draw(&ahead, None).unwrap();
        assert_eq!(batches.announce(), Some(true));
        let second = batches.draw(&ahead, None).unwrap();
        assert_eq!(batches.announce(), Some(true));
        assert_eq!(batches.announce(), None);
        // Another worker was lost before the rows came: the same records, and more.
        batches.start_over();
        batches.request([records(0, 0..6), records(0, 90..92)].concat(), false);
        assert_eq!([first, second], [records(0, 0..4), records(0, 4..7)]);
        assert_eq!([batches.announce(), batches.announce()], [Some(true), Some(false)]);
        let rest = [records(0, 4..6), records(0, 90..92)].concat();
        assert_eq!(batches.draw(&ahead, None), Some(rest));
        assert!(!batches.is_complete());
        assert_eq!((batches.announce(), batches.is_complete()), (Some(true), true));
        batches.compute(8);
        assert_eq!((batches.counted(), batches.deliver(true)), (Some((4, false)), true));
        assert_eq!((batches.counted(), batches.deliver(true)), (Some((4, true)), true));
        assert_eq!((batches.counted(), batches.deliver(true)), (None, false));
    }
}
