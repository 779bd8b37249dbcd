//! All-reduce of a buffer in parts, while the rest of it is computed.
//!
//! ```text
//! device's stream   ── compute part 0 ─┬─ compute part 1 ─┬─ …
//! side stream                          └▶ sum part 0 ─────┴▶ sum part 1 ──▶ …
//! ```
//!
//! **Invariant:** the device's stream never waits for the side stream, whose work hangs if a rank
//! is lost. What uses the sums waits on the host, where links are watched.
#![allow(unsafe_code, reason = "sums are in progress after a return")]

use std::ops::Range;

use cudarc::driver::{CudaEvent, CudaSlice, CudaViewMut, DevicePtr, DevicePtrMut};

use super::{DeviceGroup, check_header, check_len, wait_for_result};
use crate::device::nccl::{Beside, Buffers, Call, CallKind};
use crate::device::{DeviceError, Element};
use crate::exit::exit_at_once;
use crate::{CollectiveError, Communicator as _};

/// A buffer that is computed from its end to its start, while NCCL sums its completed end over all
/// ranks. See [`DeviceGroup::overlap`].
#[derive(Debug)]
pub struct Overlap<'a, T: Element> {
    group: &'a mut DeviceGroup,
    src: &'a mut CudaSlice<T>,
    dst: &'a mut CudaSlice<T>,
    /// Number of elements before those that are being summed.
    rest: usize,
    /// Number of sums that were begun.
    begun: usize,
    error: Option<CollectiveError>,
}

impl DeviceGroup {
    /// Lets `compute` fill `src` from its end to its start, and sums the parts that it declares
    /// complete with NCCL into `dst`, beside the work on the device's stream. Returns the result of
    /// `compute`, and the number of sums that were begun. All ranks sum the same parts in the same
    /// order: [`sum_rest`](Self::sum_rest) sums those that this rank has not begun here.
    ///
    /// `src`, `dst`: `[len]`, the same length on every rank, on this group's device.
    ///
    /// # Errors
    /// As for [`all_reduce_device`](Self::all_reduce_device). The group has ended.
    ///
    /// # Safety
    /// Before `sum_rest` returns or this group is dropped, `dst` is neither used nor freed, and
    /// `src` is not freed. What `compute` has declared complete is not written either.
    pub unsafe fn overlap<T: Element, R>(
        &mut self,
        src: &mut CudaSlice<T>,
        dst: &mut CudaSlice<T>,
        compute: impl FnOnce(&mut Overlap<'_, T>) -> R,
    ) -> (R, Result<usize, CollectiveError>) {
        let rest = src.len();
        let checked =
            self.host.check_alive().and_then(|()| check_len(rest, dst.len(), "an all-reduce"));
        let mut overlap = Overlap { group: self, src, dst, rest, begun: 0, error: checked.err() };
        let result = compute(&mut overlap);
        let done = overlap.settle();
        (result, done)
    }

    /// Sums the parts of `src` that [`overlap`](Self::overlap) has not begun with NCCL into `dst`.
    /// Returns every rank's `header` in rank order.
    ///
    /// `header`: at most [`HEADER_BYTES_MAX`](super::HEADER_BYTES_MAX) bytes. `src`, `dst`: those
    /// of `overlap`. `parts`: at least one; they cover the rest of the buffer, from its end.
    ///
    /// # Errors
    /// As for [`all_reduce_device`](Self::all_reduce_device).
    pub fn sum_rest<T: Element>(
        &mut self,
        header: &[u8],
        src: &CudaSlice<T>,
        dst: &mut CudaSlice<T>,
        parts: &[Range<usize>],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.host.check_alive()?;
        check_header(header)?;
        let len = src.len();
        check_len(len, dst.len(), "an all-reduce")?;
        let covers = parts.windows(2).all(|pair| pair[1].end == pair[0].start)
            && parts.first().is_some_and(|first| first.end <= len)
            && parts.iter().all(|part| part.start <= part.end)
            && parts.last().is_some_and(|last| last.start == 0);
        if !covers {
            let reason = format!("parts {parts:?} of a buffer of {len} elements");
            return Err(CollectiveError::Invalid(reason));
        }
        for part in parts {
            let waits = part.start == 0;
            if let Err(error) = self.begin_sum(src, dst, part.clone(), waits) {
                return Err(self.stop_nccl(error));
            }
        }
        let headers = self.finish_nccl(header, len, parts.len())?;
        self.is_summing = false;
        Ok(headers)
    }

    /// Ends the sums that are in progress, before the group ends.
    pub(super) fn end_overlap(&mut self) {
        if !self.is_summing {
            return;
        }
        let error = CollectiveError::Aborted { generation: self.host.generation() };
        if let CollectiveError::Device { source } = self.stop_nccl(error) {
            // Its operations could write to memory that others use.
            tracing::error!(%source, "this process ends");
            exit_at_once(1);
        }
    }

    /// Begins the sum of a part. `waits`: its result arrives when it is complete.
    fn begin_sum<T: Element>(
        &mut self,
        src: &CudaSlice<T>,
        dst: &mut CudaSlice<T>,
        part: Range<usize>,
        waits: bool,
    ) -> Result<(), CollectiveError> {
        let stream = self.device.stream().clone();
        let after = stream.record_event(None).map_err(DeviceError::cuda("record an event"));
        let after = after.map_err(|source| CollectiveError::Device { source })?;
        let (src, mut dst) = (src.slice(part.clone()), dst.slice_mut(part.clone()));
        let ((src, _read), (dst, _written)) =
            (src.device_ptr(&stream), dst.device_ptr_mut(&stream));
        let buffers = Buffers { src, dst, len: part.len(), dtype: T::DTYPE };
        let beside = Beside { stream: self.device.side_stream().clone(), after, waits };
        let call = Call { kind: CallKind::AllReduce, buffers, beside: Some(beside) };
        self.ready_communicator()?.call(call);
        self.is_summing = true;
        Ok(())
    }
}

impl<T: Element> Overlap<'_, T> {
    /// The elements that may still be written.
    pub fn rest(&mut self) -> CudaViewMut<'_, T> {
        self.src.slice_mut(..self.rest)
    }

    /// Number of elements that may still be written.
    #[must_use]
    pub fn rest_len(&self) -> usize {
        self.rest
    }

    /// Orders the sums after an event, for example the end of a copy of their destination. Before
    /// the first sum is begun.
    ///
    /// # Panics
    /// If a sum was begun: nothing else may be enqueued beside NCCL.
    pub fn wait_for(&mut self, event: &CudaEvent) {
        assert_eq!(self.begun, 0, "no sum was begun");
        let waits = self.group.device.side_stream().wait(event);
        if let Err(source) = waits.map_err(DeviceError::cuda("order two streams")) {
            self.fail(CollectiveError::Device { source });
        }
    }

    /// Begins to sum the elements from `start` on, which the work that is enqueued so far
    /// completes. After an error, this has no effect.
    ///
    /// # Panics
    /// If `start` is beyond [`rest_len`](Self::rest_len).
    pub fn sum_from(&mut self, start: usize) {
        assert!(start <= self.rest, "the elements from {start} on are being summed");
        if self.error.is_some() {
            return;
        }
        match self.group.begin_sum(self.src, self.dst, start..self.rest, false) {
            Ok(()) => {
                self.rest = start;
                self.begun += 1;
            }
            Err(error) => self.fail(error),
        }
    }

    /// Waits until all sums are on the side stream. Returns their number.
    fn settle(mut self) -> Result<usize, CollectiveError> {
        for _ in 0..self.begun {
            if let Some(error) = self.error.take() {
                return Err(error);
            }
            let communicator = self.group.ready_communicator();
            let placed = communicator
                .and_then(|communicator| wait_for_result(&self.group.host, communicator));
            if let Err(error) = placed {
                self.fail(error);
            }
        }
        self.error.map_or(Ok(self.begun), Err)
    }

    fn fail(&mut self, error: CollectiveError) {
        self.error = Some(self.group.stop_nccl(error));
    }
}
