//! Several locations of data in one text, as `--training-data` that is given several times.

/// One text for these locations.
#[must_use]
pub fn join_sources(sources: &[String]) -> String {
    sources.join(SEPARATOR)
}

/// The locations in a text of [`join_sources`].
pub fn split_sources(text: &str) -> impl Iterator<Item = &str> {
    text.split(SEPARATOR)
}

/// The locations in a text of [`join_sources`], for people.
#[must_use]
pub fn shown_sources(text: &str) -> String {
    text.replace(SEPARATOR, ", ")
}

/// A control character, which no key of an object store that can be read contains.
const SEPARATOR: &str = "\u{1f}";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_come_apart_as_they_were_joined() {
        let sources = ["a, b", "s3://c/d\n", "e"].map(str::to_owned);
        let text = join_sources(&sources);
        assert_eq!(split_sources(&text).collect::<Vec<_>>(), sources);
        assert_eq!(shown_sources(&text), "a, b, s3://c/d\n, e");
        assert_eq!(split_sources("a b").collect::<Vec<_>>(), ["a b"]);
    }
}
