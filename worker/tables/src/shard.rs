//! The rows of one shard, of all tables.

use crate::rows::Rows;
use crate::table::Table;
use crate::wire::{InvalidRows, Message, put, put_u32};

/// Rows of one shard, by table.
#[derive(Clone, Debug)]
pub(crate) struct Shard {
    pub(crate) tables: Vec<Rows>,
}

impl Shard {
    /// No rows of these tables.
    pub(crate) fn new(tables: &[Table]) -> Self {
        Self { tables: tables.iter().map(Rows::new).collect() }
    }

    /// Writes the whole shard.
    pub(crate) fn encode(&self, to: &mut Vec<u8>) {
        for rows in &self.tables {
            put_u32(to, rows.len());
            put(to, rows.words());
        }
    }

    /// Reads what [`encode`](Self::encode) has written, of these tables.
    pub(crate) fn decode(message: &mut Message<'_>, tables: &[Table]) -> Result<Self, InvalidRows> {
        let mut decoded = Vec::with_capacity(tables.len());
        for table in tables {
            let len = message.u32()? as usize;
            let words = message.column(len.saturating_mul(Rows::stride(table)))?;
            let rows = Rows::from_words(table, words);
            decoded.push(rows.ok_or_else(|| InvalidRows("a shard holds an id twice".into()))?);
        }
        Ok(Self { tables: decoded })
    }

    /// Number of bytes that [`encode`](Self::encode) writes, about.
    pub(crate) fn encoded_bytes(&self) -> u64 {
        self.tables.iter().map(|rows| size_of_val(rows.words()) as u64).sum()
    }

    pub(crate) fn touches(&self) -> u64 {
        let rows = self.tables.iter().flat_map(Rows::iter);
        rows.map(|(_, counts, _)| u64::from(counts.touches)).sum()
    }

    /// Sum of the digests of all rows, modulo 2^64.
    pub(crate) fn digest(&self) -> u64 {
        let digests = (0..).zip(&self.tables).map(|(table, rows)| rows.digest(table));
        digests.fold(0, u64::wrapping_add)
    }

    pub(crate) fn is_finite(&self) -> bool {
        let mut numbers = self.tables.iter().flat_map(Rows::iter).flat_map(|(.., numbers)| numbers);
        numbers.all(|number| number.is_finite())
    }

    pub(crate) fn rows(&self) -> u64 {
        self.tables.iter().map(|rows| rows.len() as u64).sum()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.tables.iter().map(Rows::bytes).sum()
    }
}
