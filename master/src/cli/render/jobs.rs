//! A list of jobs as a table.

use std::fmt::Write as _;

/// One line of the list: namespace, name, state, progress, workers.
pub(crate) type JobRow = [String; 5];

/// The list as a table.
pub(crate) fn to_table(rows: &[JobRow]) -> String {
    let head = ["NAMESPACE", "JOB", "STATE", "PROGRESS", "WORKERS"].map(String::from);
    let all: Vec<&JobRow> = std::iter::once(&head).chain(rows).collect();
    let width =
        |column: usize| all.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut text = String::new();
    for row in all {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
        writeln!(text, "{}", cells.join("  ").trim_end()).expect("a string takes any text");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_columns_of_a_list_are_aligned() {
        let row = |state: &str| ["ns", "job", state, "-", "3/4"].map(String::from);
        let expected = "\
NAMESPACE  JOB  STATE      PROGRESS  WORKERS
ns         job  running    -         3/4
ns         job  completed  -         3/4
";
        assert_eq!(to_table(&[row("running"), row("completed")]), expected);
    }
}
