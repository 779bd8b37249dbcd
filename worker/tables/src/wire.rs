//! Messages between ranks: numbers in little-endian order, columns after their lengths.

use bytemuck::Pod;

/// A peer sent data that is no message of this job: the ranks run different programs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a peer sent rows that can't be read: {0}; do all workers run the same program?")]
pub struct InvalidRows(pub(crate) String);

impl InvalidRows {
    /// What is wrong.
    pub fn reason(&self) -> &str {
        &self.0
    }
}

pub(crate) fn put_u32(to: &mut Vec<u8>, number: usize) {
    let number = u32::try_from(number).expect("a message describes fewer than 2^32 rows");
    to.extend_from_slice(&number.to_le_bytes());
}

pub(crate) fn put<T: Pod>(to: &mut Vec<u8>, column: &[T]) {
    to.extend_from_slice(bytemuck::cast_slice(column));
}

/// A message that is being read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Message<'a>(pub(crate) &'a [u8]);

impl<'a> Message<'a> {
    pub(crate) fn is_empty(self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn u32(&mut self) -> Result<u32, InvalidRows> {
        let bytes = self.bytes(size_of::<u32>())?;
        Ok(u32::from_le_bytes(bytes.try_into().expect("four bytes were taken")))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, InvalidRows> {
        let bytes = self.bytes(size_of::<u64>())?;
        Ok(u64::from_le_bytes(bytes.try_into().expect("eight bytes were taken")))
    }

    /// A column of `len` elements. Nothing is allocated for more than the message holds.
    pub(crate) fn column<T: Pod>(&mut self, len: usize) -> Result<Vec<T>, InvalidRows> {
        let mut part = self.part(len.saturating_mul(size_of::<T>()))?;
        let mut column = vec![T::zeroed(); len];
        part.fill(&mut column)?;
        Ok(column)
    }

    /// Reads as many elements as `to` takes.
    pub(crate) fn fill<T: Pod>(&mut self, to: &mut [T]) -> Result<(), InvalidRows> {
        let bytes = self.bytes(size_of_val(to))?;
        bytemuck::cast_slice_mut(to).copy_from_slice(bytes);
        Ok(())
    }

    /// The next `len` bytes.
    pub(crate) fn part(&mut self, len: usize) -> Result<Self, InvalidRows> {
        Ok(Self(self.bytes(len)?))
    }

    fn bytes(&mut self, len: usize) -> Result<&'a [u8], InvalidRows> {
        let Some((bytes, rest)) = self.0.split_at_checked(len) else {
            return Err(InvalidRows(format!("{len} bytes expected, {} there", self.0.len())));
        };
        self.0 = rest;
        Ok(bytes)
    }
}

// The columns are copied as they lie in memory.
const _: () = assert!(cfg!(target_endian = "little"), "messages are little-endian");
