//! Names with `<index>` in them: substitution, expansion, nearness.

use std::collections::BTreeMap;

/// `decoder_ffn`: small letters, digits and `_`, a letter first.
pub(crate) fn is_name(s: &str) -> bool {
    s.len() <= 64
        && s.starts_with(|c: char| c.is_ascii_lowercase())
        && s.chars()
            .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// `D`, `N_<i>`: letters, digits, `_` and indices, not starting with a digit.
pub(crate) fn is_symbol(s: &str) -> bool {
    let plain = substitute(s, &|_| Some("0".into()));
    plain.is_some_and(|p| {
        p.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && p.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    })
}

/// `w_<i>` -> `["i"]`, each index once.
pub(crate) fn indices(s: &str) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut rest = s;
    while let Some(a) = rest.find('<') {
        let Some(b) = rest[a..].find('>') else { break };
        let name = &rest[a + 1..a + b];
        if !found.iter().any(|f| f == name) {
            found.push(name.into());
        }
        rest = &rest[a + b + 1..];
    }
    found
}

/// Replaces every `<name>`; `None` when one is unknown or not closed.
pub(crate) fn substitute(s: &str, value: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let mut out = String::with_capacity(s.len());
    let mut rest = s;
    while let Some(a) = rest.find('<') {
        let b = rest[a..].find('>')?;
        out.push_str(&rest[..a]);
        out.push_str(&value(&rest[a + 1..a + b])?);
        rest = &rest[a + b + 1..];
    }
    out.push_str(rest);
    Some(out)
}

/// Replaces whatever index there is by a number: `N_<i>` -> `N_2`.
pub(crate) fn numbered(s: &str, n: usize) -> String {
    substitute(s, &|_| Some(n.to_string())).unwrap_or_else(|| s.into())
}

/// The names a declared, possibly repeated name stands for.
pub(crate) fn expanded(name: &str, repeat: Option<(usize, usize)>) -> Vec<String> {
    match repeat {
        None => vec![name.into()],
        Some((a, b)) => (a..b).map(|n| numbered(name, n)).collect(),
    }
}

/// `0..8` -> (0, 8): not empty, at most 64 long.
pub(crate) fn range(s: &str) -> Option<(usize, usize)> {
    let (a, b) = s.split_once("..")?;
    let (a, b) = (a.trim().parse().ok()?, b.trim().parse().ok()?);
    (a < b && b - a <= 64).then_some((a, b))
}

/// Values of axes for substitution.
pub(crate) fn of_axes(axes: &BTreeMap<String, String>) -> impl Fn(&str) -> Option<String> + '_ {
    |name| axes.get(name).cloned()
}

/// Up to three names that look like the asked one, nearest first.
pub fn nearest<'a>(asked: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut scored: Vec<(usize, &str)> = names
        .map(|n| (distance(asked, n), n))
        .filter(|(d, n)| *d <= (n.len().max(asked.len()) / 2).max(2))
        .collect();
    scored.sort();
    scored.iter().take(3).map(|(_, n)| n.to_string()).collect()
}

fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let step = corner + usize::from(x != *y);
            corner = row[j + 1];
            row[j + 1] = step.min(row[j] + 1).min(corner + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_and_substitution() {
        assert_eq!(indices("w_<i>"), ["i"]);
        assert_eq!(indices("<a>_<b>_<a>"), ["a", "b"]);
        assert_eq!(numbered("N_<i>", 2), "N_2");
        assert_eq!(substitute("a<b", &|_| None), None);
        assert!(is_symbol("N_<i>") && is_symbol("Hq") && !is_symbol("2D") && !is_symbol("a b"));
        assert_eq!(range("0..8"), Some((0, 8)));
        assert_eq!(
            (range("8..0"), range("0..99"), range("x")),
            (None, None, None)
        );
    }

    #[test]
    fn near_names() {
        let names = ["gated_ffn", "plain_ffn", "pack"];
        assert_eq!(nearest("gated_fnn", names.into_iter()), ["gated_ffn"]);
        assert!(nearest("zzzzzzzz", names.into_iter()).is_empty());
        assert_eq!(distance("abc", "acb"), 2);
    }
}
