//! Ending a text where a stop text appears, although its pieces arrive one by one.

/// Holds back what may still become a stop text.
#[derive(Clone, Debug, Default)]
pub struct Stops {
    stops: Vec<String>,
    held: String,
}

impl Stops {
    /// Empty texts stop nothing.
    pub fn new(stops: &[String]) -> Self {
        Stops {
            stops: stops.iter().filter(|s| !s.is_empty()).cloned().collect(),
            held: String::new(),
        }
    }

    /// What may be shown after this piece, and whether a stop text has appeared; nothing comes after it.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        let first = self.stops.iter().filter_map(|s| self.held.find(s)).min();
        if let Some(at) = first {
            let shown = self.held[..at].to_string();
            self.held.clear();
            return (shown, true);
        }
        // The longest end that begins a stop text stays.
        let kept = (0..self.held.len())
            .filter(|i| self.held.is_char_boundary(*i))
            .find(|i| self.stops.iter().any(|s| s.starts_with(&self.held[*i..])))
            .unwrap_or(self.held.len());
        let rest = self.held.split_off(kept);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What is still held when nothing more comes.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
        let mut s = Stops::new(&stops);
        let mut text = String::new();
        for piece in pieces {
            let (shown, done) = s.push(piece);
            text += &shown;
            if done {
                return (text, true);
            }
        }
        (text + &s.finish(), false)
    }

    #[test]
    fn a_stop_text_ends_it_however_it_is_cut() {
        for pieces in [&["a END b"][..], &["a E", "N", "D b"], &["a ", "E", "ND"]] {
            assert_eq!(run(&["END"], pieces), ("a ".into(), true), "{pieces:?}");
        }
        assert_eq!(run(&["xyz", "b"], &["a", "b", "c"]), ("a".into(), true));
    }

    #[test]
    fn what_only_began_like_one_is_shown() {
        assert_eq!(
            run(&["END"], &["a E", "NE", "EN"]),
            ("a ENEEN".into(), false)
        );
        assert_eq!(run(&["END"], &["ä EN"]), ("ä EN".into(), false));
        assert_eq!(run(&[""], &["a"]), ("a".into(), false));
        let mut s = Stops::new(&["END".to_string()]);
        assert_eq!(s.push("word E"), ("word ".to_string(), false));
    }
}
