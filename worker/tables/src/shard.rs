//! The rows of one shard, of all tables.

use crate::rows::{Counts, Rows};
use crate::table::Table;
use crate::wire::{InvalidRows, Message, put, put_u32};

/// Rows of one shard, by table.
#[derive(Clone, Debug)]
pub(crate) struct Shard {
    pub(crate) tables: Vec<Rows>,
}

impl Shard {
    pub(crate) fn new(tables: usize) -> Self {
        Self { tables: vec![Rows::default(); tables] }
    }

    /// Writes the whole shard.
    pub(crate) fn encode(&self, to: &mut Vec<u8>) {
        for rows in &self.tables {
            let (ids, counts, numbers) = rows.columns();
            put_u32(to, ids.len());
            put(to, ids);
            put(to, counts);
            put(to, numbers);
        }
    }

    /// Reads what [`encode`](Self::encode) has written, of these tables.
    pub(crate) fn decode(message: &mut Message<'_>, tables: &[Table]) -> Result<Self, InvalidRows> {
        let mut decoded = Vec::with_capacity(tables.len());
        for table in tables {
            let len = message.u32()? as usize;
            let ids = message.column(len)?;
            let counts = message.column::<Counts>(len)?;
            let numbers = message.column(len.saturating_mul(table.stored()))?;
            let rows = Rows::from_columns(ids, counts, numbers);
            decoded.push(rows.ok_or_else(|| InvalidRows("a shard holds an id twice".into()))?);
        }
        Ok(Self { tables: decoded })
    }

    /// Number of bytes that [`encode`](Self::encode) writes, about.
    pub(crate) fn encoded_bytes(&self, tables: &[Table]) -> u64 {
        let bytes = |(rows, table): (&Rows, &Table)| rows.len() * (16 + 4 * table.stored());
        self.tables.iter().zip(tables).map(bytes).sum::<usize>() as u64
    }

    pub(crate) fn touches(&self) -> u64 {
        let counts = self.tables.iter().flat_map(|rows| rows.columns().1);
        counts.map(|counts| u64::from(counts.touches)).sum()
    }

    pub(crate) fn is_finite(&self) -> bool {
        let numbers = |rows: &Rows| rows.columns().2.iter().all(|number| number.is_finite());
        self.tables.iter().all(numbers)
    }

    pub(crate) fn rows(&self) -> u64 {
        self.tables.iter().map(|rows| rows.len() as u64).sum()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.tables.iter().map(Rows::bytes).sum()
    }
}
