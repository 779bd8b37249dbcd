//! Which rows of a table a data set contains, where rows are left out.

/// The rows of a part of a table, and those of them that are left out.
#[derive(Clone, Debug, Default)]
pub(super) struct Kept {
    rows: u64,
    /// The rows that are left out, in ascending order.
    left_out: Vec<u64>,
}

impl Kept {
    /// Adds the next row.
    pub(super) fn push(&mut self, is_kept: bool) {
        if !is_kept {
            self.left_out.push(self.rows);
        }
        self.rows += 1;
    }

    /// Number of rows.
    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    /// Number of rows that are not left out.
    pub(super) fn count(&self) -> u64 {
        self.rows - self.left_out.len() as u64
    }

    /// The row that is number `index` of those that are not left out.
    pub(super) fn row(&self, index: u64) -> u64 {
        // The rows that are left out before row `index + k` are at least `k` exactly up to the
        // wanted `k`.
        let (mut low, mut high) = (0, self.left_out.len());
        while low < high {
            let middle = low.midpoint(high);
            if self.left_out[middle] - middle as u64 <= index {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        index + low as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_are_left_out_are_not_numbered() {
        for pattern in 0..1_u32 << 10 {
            let is_kept = |row: u64| pattern >> row & 1 == 1;
            let mut kept = Kept::default();
            (0..10).for_each(|row| kept.push(is_kept(row)));
            let expected: Vec<u64> = (0..10).filter(|row| is_kept(*row)).collect();
            let found: Vec<u64> = (0..kept.count()).map(|index| kept.row(index)).collect();
            assert_eq!(found, expected, "{pattern:b}");
        }
    }
}
