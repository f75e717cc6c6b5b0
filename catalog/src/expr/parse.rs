//! Recursive descent over a token list. Depth and length are limited, so a document cannot exhaust the stack.

use super::{BinaryOp, Expr, Fact, UnaryOp};

const MAX_LENGTH: usize = 4096;
const MAX_DEPTH: usize = 64;

/// Why a text is not an expression.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("at column {column} of `{text}`: expected {expected}, found {found}")]
pub struct ParseError {
    /// The expression.
    pub text: String,
    /// Character position, from 1.
    pub column: usize,
    /// What would have been right.
    pub expected: String,
    /// What stands there.
    pub found: String,
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Int(i64),
    Text(String),
    Word(String),
    Sign(&'static str),
    End,
}

impl Token {
    fn show(&self) -> String {
        match self {
            Token::Int(i) => format!("`{i}`"),
            Token::Text(s) => format!("'{s}'"),
            Token::Word(w) => format!("`{w}`"),
            Token::Sign(s) => format!("`{s}`"),
            Token::End => "the end".into(),
        }
    }
}

// Longest first, so that `<=` is not read as `<`.
const SIGNS: &[&str] = &[
    "==", "!=", "<=", ">=", "<", ">", "+", "-", "*", "/", "%", "(", ")", "[", "]", ",", ".",
];

const RESERVED: &[&str] = &[
    "and", "or", "not", "in", "if", "then", "else", "true", "false",
];

pub(super) fn parse(text: &str) -> Result<Expr, ParseError> {
    let tokens = tokens(text)?;
    let mut p = Parser {
        text,
        tokens,
        at: 0,
        depth: 0,
    };
    let e = p.expr()?;
    match p.peek() {
        Token::End => Ok(e),
        _ => Err(p.fail("an operator or the end")),
    }
}

fn tokens(text: &str) -> Result<Vec<(Token, usize)>, ParseError> {
    let fail = |column: usize, expected: &str, found: String| ParseError {
        text: text.chars().take(120).collect(),
        column: column + 1,
        expected: expected.into(),
        found,
    };
    if text.len() > MAX_LENGTH {
        let expected = format!("at most {MAX_LENGTH} bytes");
        return Err(fail(0, &expected, format!("{} bytes", text.len())));
    }
    let chars: Vec<char> = text.chars().collect();
    let mut out = Vec::new();
    let mut i = 0;
    while i < chars.len() {
        let c = chars[i];
        let start = i;
        if c.is_whitespace() {
            i += 1;
        } else if c.is_ascii_digit() {
            while i < chars.len() && chars[i].is_ascii_digit() {
                i += 1;
            }
            let digits: String = chars[start..i].iter().collect();
            let n = digits
                .parse()
                .map_err(|_| fail(start, "a number below 2^63", digits.clone()))?;
            out.push((Token::Int(n), start));
        } else if c.is_ascii_alphabetic() || c == '_' {
            while i < chars.len() && (chars[i].is_ascii_alphanumeric() || chars[i] == '_') {
                i += 1;
            }
            out.push((Token::Word(chars[start..i].iter().collect()), start));
        } else if c == '\'' || c == '"' {
            i += 1;
            while i < chars.len() && chars[i] != c {
                i += 1;
            }
            if i == chars.len() {
                return Err(fail(start, "a closing quote", "the end".into()));
            }
            out.push((Token::Text(chars[start + 1..i].iter().collect()), start));
            i += 1;
        } else {
            let rest: String = chars[i..chars.len().min(i + 2)].iter().collect();
            match SIGNS.iter().find(|s| rest.starts_with(**s)) {
                Some(s) => {
                    out.push((Token::Sign(s), start));
                    i += s.len();
                }
                None => {
                    let expected = "a number, a string, a name or an operator";
                    return Err(fail(start, expected, format!("`{c}`")));
                }
            }
        }
    }
    out.push((Token::End, chars.len()));
    Ok(out)
}

struct Parser<'a> {
    text: &'a str,
    tokens: Vec<(Token, usize)>,
    at: usize,
    depth: usize,
}

impl Parser<'_> {
    fn peek(&self) -> &Token {
        &self.tokens[self.at].0
    }

    fn next(&mut self) -> Token {
        let t = self.tokens[self.at].0.clone();
        if self.at + 1 < self.tokens.len() {
            self.at += 1;
        }
        t
    }

    fn fail(&self, expected: &str) -> ParseError {
        ParseError {
            text: self.text.chars().take(120).collect(),
            column: self.tokens[self.at].1 + 1,
            expected: expected.into(),
            found: self.peek().show(),
        }
    }

    fn is_sign(&self, s: &str) -> bool {
        matches!(self.peek(), Token::Sign(t) if *t == s)
    }

    fn is_word(&self, w: &str) -> bool {
        matches!(self.peek(), Token::Word(t) if t == w)
    }

    fn take_sign(&mut self, s: &str) -> bool {
        let yes = self.is_sign(s);
        if yes {
            self.next();
        }
        yes
    }

    fn take_word(&mut self, w: &str) -> bool {
        let yes = self.is_word(w);
        if yes {
            self.next();
        }
        yes
    }

    fn need_sign(&mut self, s: &'static str) -> Result<(), ParseError> {
        if self.take_sign(s) {
            Ok(())
        } else {
            Err(self.fail(&format!("`{s}`")))
        }
    }

    fn need_word(&mut self, w: &str) -> Result<(), ParseError> {
        if self.take_word(w) {
            Ok(())
        } else {
            Err(self.fail(&format!("`{w}`")))
        }
    }

    fn name(&mut self, what: &str) -> Result<String, ParseError> {
        match self.peek() {
            Token::Word(w) if !RESERVED.contains(&w.as_str()) => {
                let w = w.clone();
                self.next();
                Ok(w)
            }
            _ => Err(self.fail(what)),
        }
    }

    fn expr(&mut self) -> Result<Expr, ParseError> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.fail(&format!("at most {MAX_DEPTH} levels")));
        }
        let e = if self.take_word("if") {
            let a = self.expr()?;
            self.need_word("then")?;
            let b = self.expr()?;
            self.need_word("else")?;
            Expr::If(Box::new(a), Box::new(b), Box::new(self.expr()?))
        } else {
            self.or()?
        };
        self.depth -= 1;
        Ok(e)
    }

    fn or(&mut self) -> Result<Expr, ParseError> {
        let mut a = self.and()?;
        while self.take_word("or") {
            a = binary(BinaryOp::Or, a, self.and()?);
        }
        Ok(a)
    }

    fn and(&mut self) -> Result<Expr, ParseError> {
        let mut a = self.not()?;
        while self.take_word("and") {
            a = binary(BinaryOp::And, a, self.not()?);
        }
        Ok(a)
    }

    fn not(&mut self) -> Result<Expr, ParseError> {
        let mut nots = 0;
        while self.take_word("not") {
            nots += 1;
            if nots > MAX_DEPTH {
                return Err(self.fail(&format!("at most {MAX_DEPTH} levels")));
            }
        }
        let mut e = self.comparison()?;
        for _ in 0..nots {
            e = Expr::Unary(UnaryOp::Not, Box::new(e));
        }
        Ok(e)
    }

    fn comparison(&mut self) -> Result<Expr, ParseError> {
        let a = self.sum()?;
        let op = match self.peek() {
            Token::Sign("==") => BinaryOp::Eq,
            Token::Sign("!=") => BinaryOp::Ne,
            Token::Sign("<") => BinaryOp::Lt,
            Token::Sign("<=") => BinaryOp::Le,
            Token::Sign(">") => BinaryOp::Gt,
            Token::Sign(">=") => BinaryOp::Ge,
            Token::Word(w) if w == "in" => BinaryOp::In,
            _ => return Ok(a),
        };
        self.next();
        Ok(binary(op, a, self.sum()?))
    }

    fn sum(&mut self) -> Result<Expr, ParseError> {
        let mut a = self.term()?;
        loop {
            let op = match self.peek() {
                Token::Sign("+") => BinaryOp::Add,
                Token::Sign("-") => BinaryOp::Sub,
                _ => return Ok(a),
            };
            self.next();
            a = binary(op, a, self.term()?);
        }
    }

    fn term(&mut self) -> Result<Expr, ParseError> {
        let mut a = self.factor()?;
        loop {
            let op = match self.peek() {
                Token::Sign("*") => BinaryOp::Mul,
                Token::Sign("/") => BinaryOp::Div,
                Token::Sign("%") => BinaryOp::Rem,
                _ => return Ok(a),
            };
            self.next();
            a = binary(op, a, self.factor()?);
        }
    }

    fn factor(&mut self) -> Result<Expr, ParseError> {
        let mut minuses = 0;
        while self.take_sign("-") {
            minuses += 1;
            if minuses > MAX_DEPTH {
                return Err(self.fail(&format!("at most {MAX_DEPTH} levels")));
            }
        }
        let mut e = self.primary()?;
        for _ in 0..minuses {
            e = Expr::Unary(UnaryOp::Neg, Box::new(e));
        }
        Ok(e)
    }

    fn primary(&mut self) -> Result<Expr, ParseError> {
        match self.peek().clone() {
            Token::Int(i) => {
                self.next();
                Ok(Expr::Int(i))
            }
            Token::Text(s) => {
                self.next();
                Ok(Expr::Text(s))
            }
            Token::Sign("(") => {
                self.next();
                let e = self.expr()?;
                self.need_sign(")")?;
                Ok(e)
            }
            Token::Sign("[") => {
                self.next();
                let mut items = Vec::new();
                if !self.take_sign("]") {
                    loop {
                        items.push(self.expr()?);
                        if !self.take_sign(",") {
                            break;
                        }
                    }
                    self.need_sign("]")?;
                }
                Ok(Expr::List(items))
            }
            Token::Word(w) if w == "true" || w == "false" => {
                self.next();
                Ok(Expr::Bool(w == "true"))
            }
            Token::Word(w) if w == "has" => {
                self.next();
                self.need_sign("(")?;
                let mut path = self.name("a role")?;
                while self.take_sign(".") {
                    path.push('.');
                    path.push_str(&self.name("a parameter")?);
                }
                if path.split('.').count() > 2 && path.split('.').nth(1) != Some("attr") {
                    return Err(self.fail("has(role), has(role.param) or has(role.attr.name)"));
                }
                self.need_sign(")")?;
                Ok(Expr::Has(path))
            }
            Token::Word(w) if w == "conditioned" => {
                self.next();
                self.need_sign("(")?;
                let role = self.name("a role")?;
                self.need_sign(")")?;
                Ok(Expr::Conditioned(role))
            }
            Token::Word(w) if w == "takes" => {
                self.next();
                self.need_sign("(")?;
                let role = self.name("a role")?;
                let mut names = Vec::new();
                while names.is_empty() || !self.is_sign(")") {
                    self.need_sign(",")?;
                    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
                    match self.peek().clone() {
                        Token::Text(name) if name.chars().all(word) => names.push(name),
                        _ => return Err(self.fail("the name of a parameter, in quotes")),
                    }
                    self.next();
                }
                self.need_sign(")")?;
                Ok(Expr::Takes(role, names))
            }
            Token::Word(w) if !RESERVED.contains(&w.as_str()) => {
                self.next();
                if self.take_sign(".") {
                    self.role(w)
                } else {
                    Ok(Expr::Symbol(w))
                }
            }
            _ => Err(self.fail("a value")),
        }
    }

    // After `role.`
    fn role(&mut self, role: String) -> Result<Expr, ParseError> {
        let word = match self.next() {
            Token::Word(w) => w,
            _ => {
                self.at -= 1;
                return Err(self.fail("a fact of the role"));
            }
        };
        if !self.take_sign(".") {
            let fact = match word.as_str() {
                "kind" => Fact::Kind,
                "in" => Fact::In,
                "out" => Fact::Out,
                "name" => Fact::Name,
                _ => {
                    self.at -= 1;
                    return Err(
                        self.fail("kind, in, out, name, attr.NAME, PARAM.dims[i] or PARAM.count")
                    );
                }
            };
            return Ok(Expr::Fact(role, fact));
        }
        let leaf = self.name("a name")?;
        if word == "attr" {
            return Ok(Expr::Attr(role, leaf));
        }
        match leaf.as_str() {
            "count" => Ok(Expr::ParamCount(role, word)),
            "dims" => {
                self.need_sign("[")?;
                let i = match self.peek() {
                    Token::Int(i) if (0..8).contains(i) => *i as usize,
                    _ => return Err(self.fail("an index from 0 to 7")),
                };
                self.next();
                self.need_sign("]")?;
                Ok(Expr::ParamDim(role, word, i))
            }
            _ => {
                self.at -= 1;
                Err(self.fail("dims[i] or count"))
            }
        }
    }
}

fn binary(op: BinaryOp, a: Expr, b: Expr) -> Expr {
    Expr::Binary(op, Box::new(a), Box::new(b))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name() -> impl Strategy<Value = String> {
        "[A-Za-z_][A-Za-z0-9_]{0,5}".prop_filter("reserved", |w| {
            !RESERVED.contains(&w.as_str())
                && !["has", "conditioned", "takes"].contains(&w.as_str())
        })
    }

    fn param() -> impl Strategy<Value = String> {
        name().prop_filter("attr is a word of the grammar", |w| w != "attr")
    }

    fn expr() -> impl Strategy<Value = Expr> {
        let leaf = prop_oneof![
            (0..i64::MAX).prop_map(Expr::Int),
            "[ -&(-~]{0,8}".prop_map(Expr::Text),
            any::<bool>().prop_map(Expr::Bool),
            name().prop_map(Expr::Symbol),
            name().prop_map(Expr::Has),
            (name(), param()).prop_map(|(r, p)| Expr::Has(format!("{r}.{p}"))),
            (name(), name()).prop_map(|(r, p)| Expr::Has(format!("{r}.attr.{p}"))),
            name().prop_map(Expr::Conditioned),
            (name(), prop::collection::vec("[a-z_]{1,5}", 1..3))
                .prop_map(|(r, n)| Expr::Takes(r, n)),
            (
                name(),
                prop_oneof![
                    Just(Fact::Kind),
                    Just(Fact::In),
                    Just(Fact::Out),
                    Just(Fact::Name)
                ]
            )
                .prop_map(|(r, f)| Expr::Fact(r, f)),
            (name(), param(), 0usize..8).prop_map(|(r, p, i)| Expr::ParamDim(r, p, i)),
            (name(), param()).prop_map(|(r, p)| Expr::ParamCount(r, p)),
            (name(), name()).prop_map(|(r, a)| Expr::Attr(r, a)),
        ];
        leaf.prop_recursive(5, 40, 4, |inner| {
            let op = prop_oneof![
                Just(BinaryOp::Add),
                Just(BinaryOp::Sub),
                Just(BinaryOp::Mul),
                Just(BinaryOp::Div),
                Just(BinaryOp::Rem),
                Just(BinaryOp::Eq),
                Just(BinaryOp::Ne),
                Just(BinaryOp::Lt),
                Just(BinaryOp::Le),
                Just(BinaryOp::Gt),
                Just(BinaryOp::Ge),
                Just(BinaryOp::In),
                Just(BinaryOp::And),
                Just(BinaryOp::Or),
            ];
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Expr::List),
                inner
                    .clone()
                    .prop_map(|a| Expr::Unary(UnaryOp::Not, Box::new(a))),
                inner
                    .clone()
                    .prop_map(|a| Expr::Unary(UnaryOp::Neg, Box::new(a))),
                (op, inner.clone(), inner.clone()).prop_map(|(o, a, b)| binary(o, a, b)),
                (inner.clone(), inner.clone(), inner).prop_map(|(a, b, c)| Expr::If(
                    Box::new(a),
                    Box::new(b),
                    Box::new(c)
                )),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_written_parses_back(e in expr()) {
            prop_assert_eq!(parse(&e.to_string()), Ok(e));
        }

        #[test]
        fn no_text_panics(s in ".{0,60}") {
            let _ = parse(&s);
        }

        #[test]
        fn no_soup_of_tokens_panics(s in "([a-z.()\\[\\], ]|has|if|in|dims|'|[0-9]|==){0,40}") {
            let _ = parse(&s);
        }
    }

    #[test]
    fn precedence_is_the_usual_one() {
        let same = |a: &str, b: &str| assert_eq!(parse(a), parse(b), "{a}");
        same(
            "a + b * c == d and not e or f",
            "((a + (b * c)) == d and (not e)) or f",
        );
        same("a - b - c", "(a - b) - c");
        same("-a * b", "(-a) * b");
        same("if a then b else c + 1", "if a then b else (c + 1)");
        same("x in ['a', \"b\"]", "x in (['a','b'])");
        assert!(parse("a == b == c").is_err());
        assert_eq!(
            parse("r.in.count"),
            Ok(Expr::ParamCount("r".into(), "in".into()))
        );
    }

    #[test]
    fn messages_say_where_and_what() {
        let e = parse("gate.in == ").err().map(|e| e.to_string());
        assert_eq!(
            e.as_deref(),
            Some("at column 12 of `gate.in == `: expected a value, found the end")
        );
        for bad in [
            "gate.width",
            "q.weight.shape",
            "a +",
            "(a",
            "[a",
            "'a",
            "a b",
            "a ? b",
            "f(x)",
            "has(1)",
            "q.w.dims[x]",
            "q.w.dims[9]",
            "99999999999999999999",
            "and",
            "a.b.c.d",
            "has(a.b.c)",
            "takes(a)",
            "takes(a, b)",
            "takes(a, 'b'",
            "takes(a, 'b' 'c')",
            "takes(a, \"it's\")",
            "",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
        assert!(parse(&"(".repeat(200)).is_err());
        assert!(parse(&"not ".repeat(500)).is_err());
    }
}
